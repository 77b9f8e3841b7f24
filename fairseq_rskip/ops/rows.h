// The recursive skip and its norms over rows of features, forward and backward:
//
//     z_1 = skip * x + branch * f,    y_k = norm(z_k) * gain_k + bias_k,    z_{k+1} = skip * x + y_k,    k = 1 ... steps
//
// where norm(z) = (z - mean) / sqrt(var + eps), or z / sqrt(mean(z^2) + eps) for RMSNorm. Plain C++ with the vector types
// of GCC and Clang; no torch. A group of rows stays in the first-level cache for all steps, and one tree of additions
// gives all its rows' sums: their latencies, not arithmetic, would otherwise take most of the time. What a row gives never
// depends on the others of its group, nor on its place there.

#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <utility>

namespace rskip {

constexpr int kBytes = 64;

template <class T>
struct Lanes;
template <>
struct Lanes<float> {
  typedef float Vec __attribute__((vector_size(kBytes), aligned(4), may_alias));
  typedef int32_t Mask __attribute__((vector_size(kBytes)));
};
template <>
struct Lanes<double> {
  typedef double Vec __attribute__((vector_size(kBytes), aligned(8), may_alias));
  typedef int64_t Mask __attribute__((vector_size(kBytes)));
};

// Uninitialised vectors, on a cache line's boundary.
template <class T>
class Scratch {
 public:
  using Vec = typename Lanes<T>::Vec;

  Scratch() = default;
  explicit Scratch(int64_t vectors)
      : data(static_cast<Vec*>(::operator new(sizeof(Vec) * vectors, std::align_val_t(kBytes)))) {}
  Scratch(Scratch&& other) noexcept : data(std::exchange(other.data, nullptr)) {}
  Scratch& operator=(Scratch&& other) noexcept {
    std::swap(data, other.data);
    return *this;
  }
  ~Scratch() { ::operator delete(data, std::align_val_t(kBytes)); }

  Vec* get() const { return data; }

 private:
  Vec* data = nullptr;
};

// Gains and biases are [steps][vectors of a row], zero beyond the row's end.
template <class T>
struct Problem {
  using Vec = typename Lanes<T>::Vec;
  static constexpr int kLanes = kBytes / sizeof(T);

  int64_t dim, steps;
  T skip, branch, eps;
  const Vec* gains;
  const Vec* biases;

  int64_t vectors() const { return (dim + kLanes - 1) / kLanes; }
};

#if defined(__clang__)
#define RSKIP_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define RSKIP_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Mask{__VA_ARGS__})
#endif

// Lane l: the sum of lanes l and l ^ S of a where bit S of l is 0, of b where it is 1.
template <int S, class Mask, class Vec, int... L>
inline Vec fold(Vec a, Vec b, std::integer_sequence<int, L...>) {
  constexpr int n = sizeof...(L);
  const Vec straight = RSKIP_SHUFFLE(a, b, (L & S ? L + n : L)...);
  const Vec crossed = RSKIP_SHUFFLE(a, b, (L & S ? (L ^ S) + n : L ^ S)...);
  return straight + crossed;
}

// R rows at a time (a power of 2, at most as many as there are lanes), each of NV vectors (0: as many as the problem
// says). Rows are R * nv vectors, zero beyond each row's end, and so are z and y then: only the squares of deviations
// need a mask. Numbers of rows stand in the lanes of a vector: row r's in lane r. What the next group will read and
// write is asked for ahead, since memory's latency would show between groups.
template <class T, int NV, int R, bool RMS>
class Group {
 public:
  using P = Problem<T>;
  using Vec = typename P::Vec;
  using Mask = typename Lanes<T>::Mask;
  static constexpr int kLanes = P::kLanes;

  explicit Group(const P& problem)
      : p(problem),
        nv(NV ? NV : problem.vectors()),
        size(R * nv),
        inverse(T(1) / T(problem.dim)),
        memory((problem.steps + 2) * size),
        numbers(2 * problem.steps + 3) {
    for (int l = 0; l < kLanes; ++l) mask[l] = (nv - 1) * kLanes + l < p.dim ? -1 : 0;
  }

  // Fills outputs[k] with y_k; null: not wanted, never for the last.
  void forward(const Vec* x, const Vec* f, Vec* const* outputs) {
    recompute(x, f, outputs);
    const int64_t last = p.steps - 1;
    each([this, last, y = outputs[last]](int r) {
      return [y, ahead = size, step = step(last, r)](int64_t i, int64_t v) {
        __builtin_prefetch(y + i + ahead, 1);
        y[i] = step.y(i, v);
      };
    });
  }

  // From gradients[k], that of y_k (null: none; never for the last), to those of x and f; adds those of gains and biases
  // to d_params, [steps][2][nv]. d_x or d_f may be the memory of the only gradient.
  void backward(const Vec* x, const Vec* f, const Vec* const* gradients, Vec* d_x, Vec* d_f, Vec* d_params) {
    recompute(x, f, nullptr);
    const int64_t last = p.steps - 1;
    Vec *const passed = z(p.steps), *const total = z(p.steps + 1);
    const Vec* g = gradients[last];
    gather(last, d_params, [g, ahead = size](int) {
      return [=](int64_t i, int64_t) {
        __builtin_prefetch(g + i + ahead);
        return g[i];
      };
    });
    for (int64_t k = last; k > 0; --k) {
      const auto pass = [=, extra = gradients[k - 1]](Vec d, int64_t i) { return passed[i] = extra ? d + extra[i] : d; };
      if (k == last) {
        gather(k - 1, d_params, [=, this](int r) {
          return [=, slope = slope(k, g, r)](int64_t i, int64_t v) { return pass(total[i] = slope(i, v), i); };
        });
      } else {
        gather(k - 1, d_params, [=, this](int r) {
          return [=, slope = slope(k, passed, r)](int64_t i, int64_t v) {
            const Vec d = slope(i, v);
            total[i] += d;
            return pass(d, i);
          };
        });
      }
      g = passed;
    }
    each([=, this](int r) {
      return [=, ahead = size, skip = p.skip, branch = p.branch, slope = slope(0, g, r)](int64_t i, int64_t v) {
        __builtin_prefetch(d_x + i + ahead, 1);
        __builtin_prefetch(d_f + i + ahead, 1);
        const Vec d = slope(i, v);
        d_x[i] = skip * (last == 0 ? d : total[i] + d);
        d_f[i] = branch * d;
      };
    });
  }

 private:
  static constexpr int kBlock = R < 4 ? R : 4;  // rows whose sums are in registers at once
  static constexpr int kUnroll = 4 / kBlock;
  using Block = std::make_integer_sequence<int, kBlock>;

  // A row of a step, normalised, and with its gain and bias. Its numbers are copies: a store to a row might change them in
  // memory, so that every use would load them again.
  struct Step {
    const Vec *z, *gain, *bias;
    T scale, mean;

    Vec normed(int64_t i) const { return (RMS ? z[i] : z[i] - mean) * scale; }
    Vec y(int64_t i, int64_t v) const { return normed(i) * gain[v] + bias[v]; }
  };

  Step step(int64_t k, int r) const {
    return {z(k), p.gains + k * nv, p.biases + k * nv, number(2 * k)[r], number(2 * k + 1)[r]};
  }

  // scale * (t - mean(t) - n * mean(t * n)) with t = g * gain: the gradient of a row of z_k from g, that of y_k.
  struct Slope {
    const Vec *z, *gain, *g;
    T of_t, of_z, rest, mean;

    Vec operator()(int64_t i, int64_t v) const {
      const Vec t = g[i] * gain[v] * of_t;
      return RMS ? t + z[i] * of_z : t + (z[i] - mean) * of_z + rest;
    }
  };

  // to be called after gather(k)
  Slope slope(int64_t k, const Vec* g, int r) const {
    const int64_t n = 2 * p.steps;
    return {z(k), p.gains + k * nv, g, number(n)[r], number(n + 1)[r], number(n + 2)[r], number(2 * k + 1)[r]};
  }

  Vec* z(int64_t k) const { return memory.get() + k * size; }
  const T* number(int64_t k) const { return reinterpret_cast<const T*>(numbers.get() + k); }

  // z of every step, with its scale 1 / sqrt(var + eps) and mean; outputs may be null
  void recompute(const Vec* x, const Vec* f, Vec* const* outputs) {
    const T skip = p.skip, branch = p.branch;
    Vec sums = sum([=, z = z(0), ahead = size](int) {
      return [=](int64_t i, int64_t) {
        __builtin_prefetch(x + i + ahead);
        __builtin_prefetch(f + i + ahead);
        return z[i] = skip * x[i] + branch * f[i];
      };
    });
    for (int64_t k = 0;; ++k) {
      moments(k, sums);
      if (k + 1 == p.steps) return;
      sums = sum([=, this, next = z(k + 1), y = outputs ? outputs[k] : nullptr](int r) {
        return [=, step = step(k, r)](int64_t i, int64_t v) {
          const Vec value = step.y(i, v);
          if (y) y[i] = value;
          return next[i] = skip * x[i] + value;
        };
      });
    }
  }

  // in two passes, since E[z^2] - mean^2 loses digits
  void moments(int64_t k, Vec sums) {
    const Vec mean = sums * inverse;
    numbers.get()[2 * k + 1] = mean;
    const Vec squares = sum([=, z = z(k), means = number(2 * k + 1), last = nv - 1, mask = mask](int r) {
      return [=, mean = means[r]](int64_t i, int64_t v) {
        Vec d = RMS ? z[i] : z[i] - mean;
        if (!RMS && v == last) d = (Vec)((Mask)d & mask);
        return d * d;
      };
    });
    Vec scale = squares * inverse + p.eps;
    T* const one = reinterpret_cast<T*>(&scale);
    for (int r = 0; r < R; ++r) one[r] = T(1) / std::sqrt(one[r]);
    numbers.get()[2 * k] = scale;
  }

  // Adds the gradients of step k's gain and bias, and readies slope(k); `upstream(row)(i, v)` is the gradient of y_k.
  template <class F>
  __attribute__((always_inline)) void gather(int64_t k, Vec* d_params, F upstream) {
    const Vec* const gain = p.gains + k * nv;
    Vec *const d_gain = d_params + 2 * k * nv, *const d_bias = d_gain + nv;
    Vec of_t[R], of_tn[R];
    for (int first = 0; first < R; first += kBlock) {
      const auto rows = block(upstream, first, Block());
      const auto steps = block([=, this](int r) { return step(k, r); }, first, Block());
      Vec t_sums[kBlock] = {}, tn_sums[kBlock] = {};
      for (int64_t v = 0; v < nv; ++v) {
        Vec of_gain = {}, of_bias = {};
        for (int r = 0; r < kBlock; ++r) {
          const int64_t i = (first + r) * nv + v;
          const Vec g = rows[r](i, v), n = steps[r].normed(i), t = g * gain[v];
          t_sums[r] += t;
          tn_sums[r] += t * n;
          of_gain += g * n;
          of_bias += g;
        }
        d_gain[v] += of_gain;
        d_bias[v] += of_bias;
      }
      for (int r = 0; r < kBlock; ++r) {
        of_t[first + r] = t_sums[r];
        of_tn[first + r] = tn_sums[r];
      }
    }
    const Vec scale = numbers.get()[2 * k];
    Vec* const to = numbers.get() + 2 * p.steps;
    to[0] = scale;
    to[1] = tree(of_tn) * -inverse * scale * scale;
    if (!RMS) to[2] = tree(of_t) * -inverse * scale;
  }

  // the sum over each row of `terms(row)(i, v)`, the i-th vector of the group, the v-th of its row
  template <class F>
  __attribute__((always_inline)) Vec sum(F terms) const {
    Vec sums[R];
    for (int first = 0; first < R; first += kBlock) {
      const auto rows = block(terms, first, Block());
      Vec parts[kUnroll][kBlock] = {};
      int64_t v = 0;
      for (; v + kUnroll <= nv; v += kUnroll)
        for (int u = 0; u < kUnroll; ++u)
          for (int r = 0; r < kBlock; ++r) parts[u][r] += rows[r]((first + r) * nv + v + u, v + u);
      for (; v < nv; ++v)
        for (int r = 0; r < kBlock; ++r) parts[0][r] += rows[r]((first + r) * nv + v, v);
      for (int r = 0; r < kBlock; ++r) {
        sums[first + r] = parts[0][r];
        for (int u = 1; u < kUnroll; ++u) sums[first + r] += parts[u][r];
      }
    }
    return tree(sums);
  }

  template <class F>
  __attribute__((always_inline)) void each(F row) const {
    for (int r = 0; r < R; ++r) {
      const auto f = row(r);
      for (int64_t v = 0; v < nv; ++v) f(r * nv + v, v);
    }
  }

  // row(first + 0), row(first + 1), ...: what a pass knows of each row of a block
  template <class F, int... B>
  static auto block(F row, int first, std::integer_sequence<int, B...>) {
    return std::array<decltype(row(0)), sizeof...(B)>{row(first + B)...};
  }

  // lane l: the sum of the lanes of rows[l % R]
  static __attribute__((always_inline)) Vec tree(Vec (&rows)[R]) {
    folds<1>(rows);
    return rows[0];
  }

  template <int S>
  static __attribute__((always_inline)) void folds(Vec (&rows)[R]) {
    constexpr std::make_integer_sequence<int, kLanes> lanes;
    if constexpr (S < R) {
      for (int r = 0; r < R; r += 2 * S) rows[r] = fold<S, Mask>(rows[r], rows[r + S], lanes);
    } else {
      rows[0] += swapped<S>(rows[0], lanes);
    }
    if constexpr (2 * S < kLanes) folds<2 * S>(rows);
  }

  template <int S, int... L>
  static Vec swapped(Vec a, std::integer_sequence<int, L...>) {
    return RSKIP_SHUFFLE(a, a, (L ^ S)...);
  }

  const P& p;
  const int64_t nv, size;
  const T inverse;
  Scratch<T> memory, numbers;
  Mask mask;
};

}  // namespace rskip
