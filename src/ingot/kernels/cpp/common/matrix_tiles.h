// Matrix tiles (AMX): a thread has eight of up to 16 rows of 64 bytes. One product of two adds to 16 x 16 sums in fp32
// what 16 rows of 32 numbers in bf16 and 16 columns of as many give, whose numbers lie in pairs.
#pragma once
#include "vectors.h"
#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_TILES 1
#else
#define HAS_TILES 0
#endif
constexpr long SIDE = 16;  // rows, and columns, of a tile of sums
constexpr long DEEP = 32;  // numbers of a row that are multiplied at once
constexpr long LINE = 64;  // bytes of a tile's row

// Whether there are tiles: a process has them once it has asked the system, which may say no.
extern "C" long tiles() {
#if HAS_TILES
  constexpr long ASK = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool granted = syscall(SYS_arch_prctl, ASK, TILE_DATA) == 0;
  return granted;
#else
  return false;
#endif
}

#if HAS_TILES
#if defined(__SANITIZE_ADDRESS__)
static thread_local long rows_of_tiles, first_tiles;
#endif

// A thread's tiles, while this lives: the `first` ones, for sums and rows, have `rows` rows, those for columns 16.
struct Tiles {
  explicit Tiles(long rows, int first = 7) {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, zeros[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } sizes;
#if defined(__SANITIZE_ADDRESS__)
    rows_of_tiles = std::clamp(rows, 1L, SIDE), first_tiles = first;
#endif
    for (int i = 0; i < 8; i++) sizes.bytes[i] = LINE, sizes.rows[i] = i < first ? std::clamp(rows, 1L, SIDE) : SIDE;
    asm volatile("ldtilecfg %0" ::"m"(sizes));
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
};

// A tile to be multiplied, or of sums. AddressSanitizer does not see what such instructions read and write.
#if defined(__SANITIZE_ADDRESS__)
#define LOOK_AT(tile, from, stride)                                                    \
  for (long row = 0; row < (tile < first_tiles ? rows_of_tiles : SIDE); row++) {                 \
    const volatile char* at = (const char*)(from) + row * (long)(stride);              \
    (void)at[0], (void)at[LINE - 1];                                                   \
  }
#else
#define LOOK_AT(tile, from, stride)
#endif
// The compiler's own function does not say that it reads memory, so what was to be read might never be written there.
#define READ_TILE(tile, from, stride)                                                                    \
  do {                                                                                                   \
    LOOK_AT(tile, from, stride)                                                                          \
    asm volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"((long)(stride)) : "memory");        \
  } while (0)
#define WRITE_TILE(tile, to, stride)   \
  do {                                 \
    LOOK_AT(tile, to, stride)          \
    _tile_stored(tile, to, stride);    \
  } while (0)

// How tiles of columns lie: rows, and one tile and the next, so many bytes apart.
struct Columns {
  const void* at;
  long apart, next = LINE;
};

// Adds to D x J tiles of sums what D tiles of rows and J of columns give. Two by two are read before they are
// multiplied, each once: as fast as two by three where a core is alone, 10 to 15 % faster where another virtual machine
// computes on its other half.
template <int D, int J>
static inline void add_tiles(const void* one, const void* two, long stride, Columns columns) {
  const char* w = (const char*)columns.at;
  long apart = columns.apart, next = columns.next;
  READ_TILE(6, one, stride);
  READ_TILE(7, w, apart);
  if constexpr (D == 2 && J == 2) {
    READ_TILE(2, w + next, apart);
    READ_TILE(5, two, stride);
    _tile_dpbf16ps(0, 6, 7);
    _tile_dpbf16ps(1, 6, 2);
    _tile_dpbf16ps(3, 5, 7);
    _tile_dpbf16ps(4, 5, 2);
    return;
  }
  _tile_dpbf16ps(0, 6, 7);
  if constexpr (J > 1) {
    READ_TILE(7, w + next, apart);
    _tile_dpbf16ps(1, 6, 7);
  }
  if constexpr (J > 2) {
    READ_TILE(7, w + 2 * next, apart);
    _tile_dpbf16ps(2, 6, 7);
  }
  if constexpr (D > 1) {  // the other way round: the last columns are there
    READ_TILE(6, two, stride);
    if constexpr (J > 2) {
      _tile_dpbf16ps(5, 6, 7);
      READ_TILE(7, w + next, apart);
    }
    if constexpr (J > 1) {
      _tile_dpbf16ps(4, 6, 7);
      READ_TILE(7, w, apart);
    }
    _tile_dpbf16ps(3, 6, 7);
  }
}

// The sums of D x J tiles: cleared, read from memory, or written there. Rows are `stride` bytes apart, one tile and the
// next so many sums.
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
#define OF_TILES(DO, one, two, stride, next)                 \
  do {                                                       \
    DO(0, one, stride);                                      \
    if constexpr (J > 1) DO(1, one + (next), stride);        \
    if constexpr (J > 2) DO(2, one + 2 * (next), stride);    \
    if constexpr (D > 1) {                                   \
      DO(3, two, stride);                                    \
      if constexpr (J > 1) DO(4, two + (next), stride);      \
      if constexpr (J > 2) DO(5, two + 2 * (next), stride);  \
    }                                                        \
  } while (0)
template <int D, int J>
static inline void load_tiles(const float* one, const float* two, long stride) {
  OF_TILES(READ_TILE, one, two, stride, SIDE);
}
template <int D, int J>
static inline void store_tiles(float* one, float* two, long stride, long next = SIDE) {
  OF_TILES(WRITE_TILE, one, two, stride, next);
}
#endif
