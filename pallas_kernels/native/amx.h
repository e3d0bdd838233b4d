// Intel's matrix tiles (AMX): whether this process may use them, and their set-up.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__linux__) && ((defined(__clang__) && __clang_major__ >= 12) || (!defined(__clang__) && __GNUC__ >= 11))
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define JAXPAGED_AMX 1
#endif

namespace jaxpaged {

#if defined(JAXPAGED_AMX)

// The processor has tiles of int8 and bfloat16, and the kernel lets this process use them; it is asked once.
inline bool amx_is_allowed() {
  static const bool is_allowed = [] {
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
    constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25;
    if ((edx & (kBf16 | kTile | kInt8)) != (kBf16 | kTile | kInt8)) return false;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return is_allowed;
}

// This thread's eight tiles, all of 16 rows of 64 bytes, as long as this object lives.
class Tiles {
 public:
  __attribute__((target("amx-tile"))) Tiles() {
    struct alignas(64) {
      uint8_t palette, start_row, reserved[14];
      uint16_t bytes_of_row[16];
      uint8_t rows[16];
    } config;
    std::memset(&config, 0, sizeof(config));
    config.palette = 1;
    for (int tile = 0; tile < 8; ++tile) {
      config.bytes_of_row[tile] = 64;
      config.rows[tile] = 16;
    }
    // GCC 12's _tile_loadconfig reads eight bytes for all that its optimizer knows, and the rest would never be written.
    asm volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
  }
  __attribute__((target("amx-tile"))) ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

#else

inline bool amx_is_allowed() { return false; }

#endif

}  // namespace jaxpaged
