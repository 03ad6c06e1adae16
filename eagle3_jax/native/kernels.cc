// What decoding does with a few rows at a time, for XLA's CPU back end: products with matrices in float32 or bfloat16,
// and attention over a paged cache in float32. Sums add the same numbers in the same order for any number of rows: a
// row's bits are those it would get alone.
//
// Decoding waits for memory: the matrix must stream through at the rate that memory has, whatever the number of rows.
// So each thread reads one part of it from end to end, kDeep of its rows at a time, and keeps its own sums.

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

constexpr int kMaxRows = 16;
constexpr float kMasked = -std::numeric_limits<float>::infinity();
constexpr int kDeep = 8;
constexpr int kLanes = 16;
constexpr int64_t kAhead = 256;          // Numbers of each row that are fetched early.
constexpr int64_t kLeastPart = 1 << 16;  // Numbers for which waking another thread pays.
constexpr int64_t kLeastDeep = 64;       // Rows of a part, lest its sums be as much to move as itself.

typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float)), aligned(alignof(float))));
typedef uint32_t Bits __attribute__((vector_size(kLanes * sizeof(uint32_t))));
typedef uint16_t Halves __attribute__((vector_size(kLanes * sizeof(uint16_t)), aligned(alignof(uint16_t))));

// A bfloat16 is the upper half of a float.
Lanes Load(const float* w) { return *reinterpret_cast<const Lanes*>(w); }
Lanes Load(const uint16_t* w) {
  return (Lanes)(__builtin_convertvector(*reinterpret_cast<const Halves*>(w), Bits) << 16);
}
float LoadOne(const float* w) { return *w; }
float LoadOne(const uint16_t* w) {
  const uint32_t bits = static_cast<uint32_t>(*w) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

template <typename T>
struct Product {
  const float* x;  // [M, K]
  const T* w;      // [K, N]
  int64_t k, n;
};

// sums[m, :] = x[m, begin:end] w[begin:end, :] for all M rows.
template <typename T, int M>
void AddUp(const Product<T>& p, int64_t begin, int64_t end, float* sums) {
  std::fill(sums, sums + M * p.n, 0.0f);
  for (int64_t at = begin; at < end; at += kDeep) {
    const T* w = p.w + at * p.n;
    const int deep = static_cast<int>(std::min<int64_t>(kDeep, end - at));
    float x[kDeep][M];
    for (int d = 0; d < deep; ++d)
      for (int m = 0; m < M; ++m) x[d][m] = p.x[m * p.k + at + d];
    int64_t n = 0;
    if (deep == kDeep) {
      // The next numbers of these rows, or the first ones of the next rows.
      const bool last = at + 2 * kDeep > end;
      const int64_t turn = p.n - kAhead, wrap = last ? 0 : (kDeep - 1) * p.n;
      for (; n + kLanes <= p.n; n += kLanes) {
        const T* ahead = w + n + kAhead + (n < turn ? 0 : wrap);
        Lanes sum[M];
        for (int m = 0; m < M; ++m) sum[m] = *reinterpret_cast<const Lanes*>(sums + m * p.n + n);
#pragma GCC unroll 8
        for (int d = 0; d < kDeep; ++d) {
          const Lanes row = Load(w + d * p.n + n);
          __builtin_prefetch(ahead + d * p.n);
#pragma GCC unroll 16
          for (int m = 0; m < M; ++m) sum[m] += x[d][m] * row;
        }
        for (int m = 0; m < M; ++m) *reinterpret_cast<Lanes*>(sums + m * p.n + n) = sum[m];
      }
    }
    for (; n < p.n; ++n)
      for (int m = 0; m < M; ++m)
        for (int d = 0; d < deep; ++d) sums[m * p.n + n] += x[d][m] * LoadOne(w + d * p.n + n);
  }
}

template <typename T, int... I>
constexpr auto ByRows(std::integer_sequence<int, I...>) {
  return std::array<void (*)(const Product<T>&, int64_t, int64_t, float*), sizeof...(I)>{AddUp<T, I + 1>...};
}

void Pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

// Memory of the calling thread, kept for its next call.
float* Scratch(int64_t size) {
  static thread_local std::vector<float> memory;
  if (memory.size() < static_cast<size_t>(size)) memory.resize(size);
  return memory.data();
}

ffi::Error OutOfMemory() { return ffi::Error(ffi::ErrorCode::kResourceExhausted, "no memory for a native kernel"); }

// do_part(0) .. do_part(parts - 1) on this thread and those of the pool that come in time.
template <typename F>
void InParallel(ffi::ThreadPool& pool, int64_t parts, F do_part) {
  // One that comes too late finds no part left, maybe after this call has returned: what it looks at then is its own
  // share of.
  struct Progress {
    std::atomic<int64_t> taken{0}, done{0};
  };
  auto progress = std::make_shared<Progress>();
  const std::function<void()> work = [=] {
    for (int64_t i; (i = progress->taken.fetch_add(1)) < parts;) {
      do_part(i);
      progress->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t i = 1; i < std::min(pool.num_threads(), parts); ++i) pool.Schedule(std::function<void()>(work));
  work();
  // Only parts that a running thread has taken are left: waiting cannot block one that has not begun.
  while (progress->done.load(std::memory_order_acquire) < parts) Pause();
}

template <typename T>
void Multiply(ffi::ThreadPool& pool, int64_t rows, const Product<T>& product, float* first) {
  static constexpr auto kAddUp = ByRows<T>(std::make_integer_sequence<int, kMaxRows>());
  // The same for any number of rows, as are the bits then.
  const int64_t worth = std::min(product.k / kLeastDeep, product.k * product.n / kLeastPart);
  const int64_t most = std::min<int64_t>(pool.num_threads(), worth);
  const int64_t parts = std::max<int64_t>(most, 1), size = rows * product.n;
  const int64_t deep = ((product.k + parts - 1) / parts + kDeep - 1) / kDeep * kDeep;
  float* rest = Scratch((parts - 1) * size);
  InParallel(pool, parts, [=, add_up = kAddUp[rows - 1]](int64_t i) {
    const int64_t begin = std::min(product.k, i * deep), end = std::min(product.k, begin + deep);
    add_up(product, begin, end, i ? rest + (i - 1) * size : first);
  });
  const int64_t pieces = std::min(parts, (parts - 1) * size / kLeastPart + 1);
  InParallel(pool, pieces, [=](int64_t piece) {
    const int64_t begin = size * piece / pieces, end = size * (piece + 1) / pieces;
    for (int64_t i = 0; i < parts - 1; ++i)
      for (int64_t j = begin; j < end; ++j) first[j] += rest[i * size + j];
  });
}

ffi::Error FewRows(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer w, ffi::ResultBuffer<ffi::F32> y) try {
  const auto rows = x.dimensions(), matrix = w.dimensions(), result = y->dimensions();
  if (rows.size() != 2 || matrix.size() != 2 || result.size() != 2 || rows[0] < 1 || rows[0] > kMaxRows ||
      rows[1] != matrix[0] || result[0] != rows[0] || result[1] != matrix[1]) {
    return ffi::Error::InvalidArgument("few_rows takes [M, K] and [K, N] with M from 1 to 16");
  }
  if (w.element_type() == ffi::F32) {
    const auto* matrix_data = static_cast<const float*>(w.untyped_data());
    Multiply<float>(pool, rows[0], {x.typed_data(), matrix_data, matrix[0], matrix[1]}, y->typed_data());
  } else if (w.element_type() == ffi::BF16) {
    const auto* matrix_data = static_cast<const uint16_t*>(w.untyped_data());
    Multiply<uint16_t>(pool, rows[0], {x.typed_data(), matrix_data, matrix[0], matrix[1]}, y->typed_data());
  } else {
    return ffi::Error::InvalidArgument("few_rows takes a matrix in float32 or bfloat16");
  }
  return ffi::Error::Success();
} catch (const std::bad_alloc&) {
  return OutOfMemory();
}

struct Attention {
  const float *q, *k, *v;    // [B, T, N, D], [B, T, R, D], [B, T, R, D]
  const float* pool;         // [S, R, 2 D], keys before values
  const int32_t *table, *start;  // [B, M], [B]
  const bool* visible;       // [T, T]
  float* y;                  // [B, T, N D]
  int64_t queries, heads, kv_heads, width, slots, blocks, block_size, window;
  float scale;

  // Tokens in the cache. A row that has ended may be drafted for past its table; what it gets is not looked at.
  int64_t Before(int64_t row) const { return std::clamp<int64_t>(start[row], 0, blocks * block_size); }
};

float Dot(const float* a, const float* b, int64_t width) {
  Lanes sums{};
  int64_t d = 0;
  for (; d + kLanes <= width; d += kLanes) sums += Load(a + d) * Load(b + d);
  float sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += sums[i];
  for (; d < width; ++d) sum += a[d] * b[d];
  return sum;
}

void AddTo(float* y, float weight, const float* x, int64_t width) {
  for (int64_t d = 0; d < width; ++d) y[d] += weight * x[d];
}

// exp(x) for x <= 0 or NaN, to 2e-7 of it; 0 below exp(-87). A polynomial, so that loops over it are vectorised.
inline float ExpOfNegative(float x) {
  const float clipped = x < -87.0f ? -87.0f : x;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const float n = clipped * 1.44269504f + kRound - kRound;
  const float r = (clipped - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const int32_t bits = (static_cast<int32_t>(n == n ? n : 0.0f) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof(power));
  return x < -87.0f ? 0.0f : p * power;
}

// The queries of one row of the batch that share a key-value head; scores and weights are [T G, tokens].
void AttendHead(const Attention& a, int64_t row, int64_t head, float* scores) {
  const int64_t group = a.heads / a.kv_heads, rows = a.queries * group;
  const int64_t before = a.Before(row), tokens = before + a.queries;
  const int32_t* table = a.table + row * a.blocks;
  const auto place = [&](int64_t r) {
    return ((row * a.queries + r / group) * a.heads + head * group + r % group) * a.width;
  };
  const auto own = [&](const float* x, int64_t t) { return x + ((row * a.queries + t) * a.kv_heads + head) * a.width; };
  const auto kept = [&](int64_t position) {
    const int64_t block = std::min(position / a.block_size, a.blocks - 1);
    const int64_t slot = table[block] * a.block_size + position % a.block_size;
    return a.pool + (std::clamp<int64_t>(slot, 0, a.slots - 1) * a.kv_heads + head) * 2 * a.width;
  };
  const auto sees = [&](int64_t t, int64_t position) {
    if (a.window && before + t - position >= a.window) return false;
    return position < before || a.visible[t * a.queries + position - before];
  };

  for (int64_t s = 0; s < tokens; ++s) {
    const float* key = s < before ? kept(s) : own(a.k, s - before);
    for (int64_t r = 0; r < rows; ++r) {
      scores[r * tokens + s] = sees(r / group, s) ? a.scale * Dot(a.q + place(r), key, a.width) : kMasked;
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    float* weights = scores + r * tokens;
    const float highest = *std::max_element(weights, weights + tokens);
    for (int64_t s = 0; s < tokens; ++s) weights[s] = ExpOfNegative(weights[s] - highest);
    float total = 0;
    for (int64_t s = 0; s < tokens; ++s) total += weights[s];
    for (int64_t s = 0; s < tokens; ++s) weights[s] /= total;
    std::fill_n(a.y + place(r), a.width, 0.0f);
  }
  for (int64_t s = 0; s < tokens; ++s) {
    const float* value = s < before ? kept(s) + a.width : own(a.v, s - before);
    for (int64_t r = 0; r < rows; ++r) {
      // A weight of zero does not silence a NaN among the values.
      if (sees(r / group, s)) AddTo(a.y + place(r), scores[r * tokens + s], value, a.width);
    }
  }
}

ffi::Error FewQueries(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::F32> k, ffi::Buffer<ffi::F32> v,
                      ffi::Buffer<ffi::F32> kept, ffi::Buffer<ffi::S32> table, ffi::Buffer<ffi::S32> start,
                      ffi::Buffer<ffi::PRED> visible, ffi::ResultBuffer<ffi::F32> y, float scale, int64_t block_size,
                      int64_t window) try {
  const auto queries = q.dimensions(), keys = k.dimensions(), pools = kept.dimensions(), tables = table.dimensions();
  if (queries.size() != 4 || keys.size() != 4 || pools.size() != 3 || tables.size() != 2 || !keys[2] ||
      queries[2] % keys[2] || pools[1] != keys[2] || pools[2] != 2 * queries[3] || keys[3] != queries[3] ||
      !pools[0] || !tables[1]) {
    return ffi::Error::InvalidArgument("few_queries takes [B, T, N, D], [B, T, R, D] twice, [S, R, 2 D] and [B, M]");
  }
  const int64_t batch = queries[0];
  const Attention attention{q.typed_data(), k.typed_data(), v.typed_data(), kept.typed_data(), table.typed_data(),
                            start.typed_data(), visible.typed_data(), y->typed_data(), queries[1], queries[2], keys[2],
                            queries[3], pools[0], tables[1], block_size, window, scale};
  int64_t longest = 0;
  for (int64_t row = 0; row < batch; ++row) longest = std::max(longest, attention.Before(row) + queries[1]);
  const int64_t size = queries[1] * (queries[2] / keys[2]) * longest;
  // Of all heads at once: a thread that takes a head may have come from another call that waits.
  float* scores = Scratch(batch * keys[2] * size);
  InParallel(pool, batch * keys[2], [=, heads = keys[2]](int64_t i) {
    AttendHead(attention, i / heads, i % heads, scores + i * size);
  });
  return ffi::Error::Success();
} catch (const std::bad_alloc&) {
  return OutOfMemory();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(eagle3_few_queries, FewQueries,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("block_size")
                                  .Attr<int64_t>("window"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(eagle3_few_rows, FewRows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
