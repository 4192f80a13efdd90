"""The CPU at full speed: native kernels, how they are built, and the decoder that runs on them.

`features` says which instruction sets this CPU has, `build` compiles `native/*.cpp` for one of them into a shared
library and keeps it in the user's cache, `library` loads it through ctypes. The sources see no torch: everything
crosses a plain C ABI as pointers and sizes.
"""
