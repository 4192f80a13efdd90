// Asks the system for what the kernels need beyond ordinary registers.
#include "abi.h"

#if defined(__AMX_TILE__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

// 1 when this process may use the instructions that the library was compiled for. Before any helper thread is made.
RHIZOME_EXPORT int rhizome_enable() {
#if !defined(__AMX_TILE__) || defined(RHIZOME_EMULATED_AMX)  // tests/native/emulated_amx.h
  return 1;
#elif defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return 0;
#endif
}
