// The product of a few float32 rows with a matrix in float32 or bfloat16, for XLA's CPU back end.
//
// Decoding waits for memory: the matrix must stream through at the rate that memory has, whatever the number of rows.
// So each thread reads one part of it from end to end, kDeep of its rows at a time, and keeps its own sums. Every sum
// adds the same numbers in the same order for any number of rows: a row's bits are those it would get alone.

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

constexpr int kMaxRows = 16;
constexpr int kDeep = 8;
constexpr int kLanes = 16;
constexpr int64_t kAhead = 256;          // Numbers of each row that are fetched early.
constexpr int64_t kLeastPart = 1 << 16;  // Numbers of the matrix for which waking another thread pays.

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

template <typename T>
void Multiply(ffi::ThreadPool& pool, int64_t rows, const Product<T>& product, float* first) {
  static constexpr auto kAddUp = ByRows<T>(std::make_integer_sequence<int, kMaxRows>());
  const int64_t most = std::min<int64_t>(pool.num_threads(), product.k * product.n / kLeastPart);
  const int64_t parts = std::max<int64_t>(most, 1), size = rows * product.n;
  const int64_t deep = ((product.k + parts - 1) / parts + kDeep - 1) / kDeep * kDeep;
  static thread_local std::vector<float> others;
  if (others.size() < static_cast<size_t>((parts - 1) * size)) others.resize((parts - 1) * size);
  float* rest = others.data();

  // Threads take part after part. One that comes too late finds none, maybe after this call has returned: what it
  // looks at then is its own share of.
  struct Progress {
    std::atomic<int64_t> taken{0}, done{0};
  };
  auto progress = std::make_shared<Progress>();
  const std::function<void()> work = [=, add_up = kAddUp[rows - 1]] {
    for (int64_t i; (i = progress->taken.fetch_add(1)) < parts;) {
      const int64_t begin = std::min(product.k, i * deep), end = std::min(product.k, begin + deep);
      add_up(product, begin, end, i ? rest + (i - 1) * size : first);
      progress->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t i = 1; i < parts; ++i) pool.Schedule(std::function<void()>(work));
  work();
  // Only parts that a running thread has taken are left: waiting cannot block one that has not begun.
  while (progress->done.load(std::memory_order_acquire) < parts) Pause();
  for (int64_t i = 0; i < parts - 1; ++i)
    for (int64_t j = 0; j < size; ++j) first[j] += rest[i * size + j];
}

ffi::Error FewRows(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer w, ffi::ResultBuffer<ffi::F32> y) {
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
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(eagle3_few_rows, FewRows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
