// Matrix tiles (AMX). A thread has eight tile registers of up to 16 rows of 64 bytes. A tile product adds the product
// of a row tile A (16 rows of 32 bf16 numbers) and a column tile B (pairs of bf16 numbers of 16 columns) to 16 x 16
// fp32 sums.
#pragma once
#include "vectors.h"
#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_AMX 1
#else
#define HAS_AMX 0
#endif
constexpr long TILE = 16;        // rows and columns of a tile of sums
constexpr long TILE_K = 32;      // bf16 numbers of a row of A: the depth of a tile product
constexpr long TILE_BYTES = 64;  // bytes of a row of any tile

// Whether the process may use tiles. It has to ask the operating system, which may refuse.
extern "C" long amx_enabled() {
#if HAS_AMX
  constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool granted = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
  return granted;
#else
  return false;
#endif
}

#if HAS_AMX
#if defined(__SANITIZE_ADDRESS__)
static thread_local long configured_rows, configured_first;
#endif

// Configures the tiles of a thread for the lifetime of the object. The `first` tiles (sums and A) have `rows` rows, the
// others (B) 16.
struct TileConfig {
  explicit TileConfig(long rows, int first = 7) {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, zeros[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
#if defined(__SANITIZE_ADDRESS__)
    configured_rows = std::clamp(rows, 1L, TILE), configured_first = first;
#endif
    for (int i = 0; i < 8; i++)
      config.bytes[i] = TILE_BYTES, config.rows[i] = i < first ? std::clamp(rows, 1L, TILE) : TILE;
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  ~TileConfig() { _tile_release(); }
  TileConfig(const TileConfig&) = delete;
};

// AddressSanitizer does not see the memory accesses of tile instructions, so its builds touch the memory first.
#if defined(__SANITIZE_ADDRESS__)
#define TOUCH(tile, from, stride)                                                          \
  for (long row = 0; row < (tile < configured_first ? configured_rows : TILE); row++) {    \
    const volatile char* at = (const char*)(from) + row * (long)(stride);                  \
    (void)at[0], (void)at[TILE_BYTES - 1];                                                 \
  }
#else
#define TOUCH(tile, from, stride)
#endif
// Inline assembly, because the intrinsic does not declare that it reads memory, so GCC may drop the stores before it.
#define LOAD_TILE(tile, from, stride)                                                                    \
  do {                                                                                                   \
    TOUCH(tile, from, stride)                                                                            \
    asm volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"((long)(stride)) : "memory");        \
  } while (0)
#define STORE_TILE(tile, to, stride)   \
  do {                                 \
    TOUCH(tile, to, stride)            \
    _tile_stored(tile, to, stride);    \
  } while (0)

// Layout of column tiles in memory: bytes between rows, and between adjacent tiles.
struct TileColumns {
  const void* at;
  long stride, next = TILE_BYTES;
};

// Adds the products of D row tiles (at a0 and a1) and J column tiles to D x J tiles of sums. For 2 x 2 all tiles are
// loaded before they are multiplied: as fast as 2 x 3 on an idle core, and 10 to 15 % faster on a shared one.
template <int D, int J>
static inline void accumulate_tiles(const void* a0, const void* a1, long a_stride, TileColumns b) {
  const char* w = (const char*)b.at;
  long stride = b.stride, next = b.next;
  LOAD_TILE(6, a0, a_stride);
  LOAD_TILE(7, w, stride);
  if constexpr (D == 2 && J == 2) {
    LOAD_TILE(2, w + next, stride);
    LOAD_TILE(5, a1, a_stride);
    _tile_dpbf16ps(0, 6, 7);
    _tile_dpbf16ps(1, 6, 2);
    _tile_dpbf16ps(3, 5, 7);
    _tile_dpbf16ps(4, 5, 2);
    return;
  }
  _tile_dpbf16ps(0, 6, 7);
  if constexpr (J > 1) {
    LOAD_TILE(7, w + next, stride);
    _tile_dpbf16ps(1, 6, 7);
  }
  if constexpr (J > 2) {
    LOAD_TILE(7, w + 2 * next, stride);
    _tile_dpbf16ps(2, 6, 7);
  }
  if constexpr (D > 1) {  // in reverse order, because the last column tile is loaded
    LOAD_TILE(6, a1, a_stride);
    if constexpr (J > 2) {
      _tile_dpbf16ps(5, 6, 7);
      LOAD_TILE(7, w + next, stride);
    }
    if constexpr (J > 1) {
      _tile_dpbf16ps(4, 6, 7);
      LOAD_TILE(7, w, stride);
    }
    _tile_dpbf16ps(3, 6, 7);
  }
}

// Clear, load or store D x J tiles of sums: two rows of tiles at c0 and c1, `stride` bytes between rows, `next` floats
// between adjacent tiles.
template <int D, int J>
static inline void clear_tiles() {
  _tile_zero(0);
  if constexpr (J > 1) _tile_zero(1);
  if constexpr (J > 2) _tile_zero(2);
  if constexpr (D > 1) {
    _tile_zero(3);
    if constexpr (J > 1) _tile_zero(4);
    if constexpr (J > 2) _tile_zero(5);
  }
}
#define EACH_TILE(DO, c0, c1, stride, next)                  \
  do {                                                       \
    DO(0, c0, stride);                                       \
    if constexpr (J > 1) DO(1, c0 + (next), stride);         \
    if constexpr (J > 2) DO(2, c0 + 2 * (next), stride);     \
    if constexpr (D > 1) {                                   \
      DO(3, c1, stride);                                     \
      if constexpr (J > 1) DO(4, c1 + (next), stride);       \
      if constexpr (J > 2) DO(5, c1 + 2 * (next), stride);   \
    }                                                        \
  } while (0)
template <int D, int J>
static inline void load_tiles(const float* c0, const float* c1, long stride) {
  EACH_TILE(LOAD_TILE, c0, c1, stride, TILE);
}
template <int D, int J>
static inline void store_tiles(float* c0, float* c1, long stride, long next = TILE) {
  EACH_TILE(STORE_TILE, c0, c1, stride, next);
}
#endif
