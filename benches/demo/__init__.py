"""The main job, end to end: three users, three long prompts, one small server process after another, one store."""
