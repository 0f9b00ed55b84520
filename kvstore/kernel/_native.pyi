"""What ``native/build_kernel.py`` compiles; contracts stand in ``native/kvs_kernel.h``."""

class CData:
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> int: ...

class _FFI:
    NULL: CData
    def new(self, cdecl: str, init: object = ...) -> CData: ...
    def from_buffer(self, cdecl: str, data: object, require_writable: bool = ...) -> CData: ...
    def sizeof(self, cdecl: str | CData) -> int: ...
    def string(self, cdata: CData) -> bytes: ...

class _Lib:
    KVS_SEGMENT_ALIGN: int
    KVS_MAX_DIMS: int
    KVS_MAX_THREADS: int
    KVS_MAX_PREFIX: int
    def kvs_crc32c(self, seed: int, data: bytes | CData, length: int) -> int: ...
    def kvs_crc32c_with(self, path: bytes, seed: int, data: bytes | CData, length: int, result: CData) -> int: ...
    def kvs_crc32c_path(self, i: int) -> CData: ...
    def kvs_crc32c_force(self, path: bytes | CData) -> int: ...
    def kvs_gather(
        self,
        rows: CData,
        streams: int,
        blocks: int,
        payloads: CData,
        first: CData,
        tokens: CData,
        offsets: CData,
        offset_row: CData,
        sums: CData,
        threads: int,
    ) -> None: ...
    def kvs_scatter(
        self,
        rows: CData,
        streams: int,
        blocks: int,
        payloads: CData,
        first: CData,
        tokens: CData,
        used: CData,
        offsets: CData,
        offset_row: CData,
        sums: CData,
        threads: int,
    ) -> None: ...
    def kvs_map_open(self, fd: int, length: int, address: CData) -> int: ...
    def kvs_map_populate(self, address: int, length: int) -> int: ...
    def kvs_map_discard(self, address: int, length: int) -> int: ...
    def kvs_map_close(self, address: int, length: int) -> int: ...
    def kvs_crc32c_each(self, data: CData, count: int, length: int, skip: int, sums: CData) -> None: ...
    def kvs_read_headers(
        self,
        fd: int,
        count: int,
        offsets: CData,
        expected: CData,
        prefix: int,
        sums: int,
        found: CData,
        status: CData,
    ) -> None: ...

ffi: _FFI
lib: _Lib
