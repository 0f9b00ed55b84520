/* Private to the kernel: memory that cold bytes are read into. */
#ifndef KVS_BUFFERS_H
#define KVS_BUFFERS_H

enum { KVS_BUFFER = 2 << 20 }; /* bytes: a huge page, and more than a piece */

/*
 * One of the process's buffers, or a fresh one; NULL where there is no memory. Its contents are undefined. A forked child has none
 * of them.
 */
unsigned char *kvs_buffer_take(void);

/* Gives it back for the next who takes one. A few are kept for good. From any thread. */
void kvs_buffer_give(unsigned char *buffer);

#endif
