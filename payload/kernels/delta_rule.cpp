// The gated delta rule of linear attention, forward and backward, in chunks of 64 tokens.
//
// payload/train/families/qwen3_5/delta_rule.py has the rule, and the same in torch. Here, a task is
// one head of queries and keys of one sequence, with the heads of values that share it. The
// matrices of a chunk stay in the core's L2 cache. The backward pass first computes the forward
// pass again, and keeps the state before each chunk. Results do not depend on the number of
// threads.
//
// In a chunk with the state S, new values N and lower triangular matrices L and A:
//   D = write (V - carried key (K S)),  N = (1 + L)^-1 D,  out = query carried (Q S) + A N,
//   S' = ended S + K^T (left key N)
// where lower-case names are factors of rows, and L and A are K K^T and Q K^T with scaled rows and
// columns, multiplied by the decay between their tokens.
#include "chunk_products.h"

namespace {

constexpr int64_t kChunk = 64, kSquare = kChunk * kChunk;
constexpr float kEps = 1e-6f;
// A smaller decay is 0, because rounding is larger, and numbers near fp32's smallest are slow.
constexpr float kLeastDecay = 1e-13f;

// Inlined into each of their callers, these functions would lengthen this file's build by a half.
#define NOT_INLINED __attribute__((noinline))

// Sizes of `mixed`: in each token the queries and the keys of all groups, then all heads' values.
struct Sizes {
  int64_t batch, length, groups, heads, keys, values;

  int64_t chunks() const { return (length + kChunk - 1) / kChunk; }
  int64_t rows(int64_t chunk) const { return std::min(kChunk, length - chunk * kChunk); }
  int64_t mixed() const { return 2 * groups * keys + heads * values; }
  int64_t shared() const { return heads / groups; }
  // Widths with zeros up to whole tiles.
  int64_t key_width() const { return padded(keys); }
  int64_t value_width() const { return padded(values); }
  int64_t state() const { return key_width() * value_width(); }
  int64_t largest() const {
    return std::max({kSquare, state(), kChunk * key_width(), kChunk * value_width()});
  }
};

NOT_INLINED void to_elements(const float* from, int64_t count, element* to) {
  round_all(from, count, to);
}

NOT_INLINED void load(const element* from, int64_t stride, int64_t rows, int64_t width,
                      element* to) {
  const int64_t wide = padded(width);
  for (int64_t row = 0; row < kChunk; ++row, to += wide) {
    const int64_t count = row < rows ? width : 0;
    if (count) std::memcpy(to, from + row * stride, count * sizeof(element));
    std::fill(to + count, to + wide, element{0});
  }
}

NOT_INLINED void store(const float* from, int64_t wide, int64_t rows, int64_t width, element* to,
                       int64_t stride) {
  for (int64_t row = 0; row < rows; ++row) to_elements(from + row * wide, width, to + row * stride);
}

// to = factor of the row times from.
template <typename T>
NOT_INLINED void scale_rows(const T* from, const float* factor, int64_t width, element* to) {
  for (int64_t row = 0; row < kChunk; ++row, from += width, to += width) {
    const float times = factor[row];
    fill(width, to, [=](int64_t i) { return times * to_float(from[i]); });
  }
}

template <typename A, typename B>
NOT_INLINED float dot(const A* a, const B* b, int64_t count) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) sum += to_float(a[i]) * to_float(b[i]);
  return sum;
}

// Queries and keys of a chunk, and their inverse lengths.
struct Shared {
  element *query, *key;
  float query_length[kChunk], key_length[kChunk];

  Shared(const Sizes& s, Scratch& scratch)
      : query(scratch.take<element>(kChunk * s.key_width())),
        key(scratch.take<element>(kChunk * s.key_width())) {}

  NOT_INLINED void read(const Sizes& s, const element* mixed, int64_t group, int64_t rows) {
    load(mixed + group * s.keys, s.mixed(), rows, s.keys, query);
    load(mixed + (s.groups + group) * s.keys, s.mixed(), rows, s.keys, key);
    const int64_t width = s.key_width();
    for (int64_t row = 0; row < kChunk; ++row) {
      const element *q = query + row * width, *k = key + row * width;
      query_length[row] = 1.0f / std::sqrt(dot(q, q, width) + kEps);
      key_length[row] = 1.0f / std::sqrt(dot(k, k, width) + kEps);
    }
  }
};

// Factors of rows and columns in a head's chunk.
struct Factors {
  alignas(64) float between[kSquare];  // the decay from the column's token to the row's
  float query[kChunk], write[kChunk];
  float carried[kChunk];  // the decay from the chunk's start; 0 if the document began later
  float read[kChunk];     // carried, times the key's inverse length
  float stored[kChunk];   // the decay to the chunk's end, times the key's inverse length
  bool begins[kChunk];    // whether a document begins with the token

  // `write`, `decay` and `starts` begin at the chunk's first token, which is the sequence's token
  // `before`. The tokens that fill the last chunk continue the last document.
  NOT_INLINED void compute(const Sizes& s, const Shared& shared, const float* write_of,
                           const float* decay_of, const int64_t* starts, int64_t before,
                           int64_t rows) {
    const float root = 1.0f / std::sqrt(static_cast<float>(s.keys));
    for (int64_t i = 0; i < kChunk; ++i) {
      const bool exists = i < rows;
      const float decay = exists ? std::exp(decay_of[i * s.heads]) : 1.0f;
      write[i] = exists ? 1.0f / (1.0f + std::exp(-write_of[i * s.heads])) : 0.0f;
      query[i] = shared.query_length[i] * root;
      const int64_t start = starts ? starts[std::min(i, rows - 1)] : 0;
      begins[i] = start == before + i;
      float* row = between + i * kChunk;
      if (i == 0 || begins[i]) {
        std::fill_n(row, kChunk, 0.0f);
      } else {
        const float* above = row - kChunk;
#pragma omp simd
        for (int64_t j = 0; j < kChunk; ++j) {
          const float kept = above[j] * decay;
          row[j] = kept < kLeastDecay ? 0.0f : kept;
        }
      }
      row[i] = 1.0f;
      float kept = (i ? carried[i - 1] : 1.0f) * decay;
      if (begins[i] || start > before || kept < kLeastDecay) kept = 0.0f;
      carried[i] = kept;
      read[i] = kept * shared.key_length[i];
    }
    const float* last = between + kSquare - kChunk;
    for (int64_t i = 0; i < kChunk; ++i) stored[i] = last[i] * shared.key_length[i];
  }

  float ended() const { return carried[kChunk - 1]; }
};

// Memory for a chunk's intermediate matrices.
struct Workspace {
  Factors factors;
  Operands operands;
  float *square, *other_square, *wide;
  element *rounded, *low;

  Workspace(const Sizes& s, Scratch& scratch)
      : operands(scratch, s.largest()),
        square(scratch.take<float>(kSquare)),
        other_square(scratch.take<float>(kSquare)),
        wide(scratch.take<float>(s.largest())),
        rounded(scratch.take<element>(s.largest())),
        low(scratch.take<element>(s.largest())) {}
};

// What the backward pass needs of a chunk: the state before, the inverse, D and the new values.
struct Kept {
  element *state, *inverse, *missing, *made;

  static int64_t size(const Sizes& s) {
    return s.state() + kSquare + 2 * kChunk * s.value_width();
  }
  Kept(const Sizes& s, element* memory)
      : state(memory),
        inverse(state + s.state()),
        missing(inverse + kSquare),
        made(missing + kChunk * s.value_width()) {}
};

// The products of rows with keys become factors of the chunk's values: scales rows and columns, and
// decays them. What is above the diagonal becomes 0, with `strictly` the diagonal, too.
NOT_INLINED void decay_products(const Factors& factors, const float* row_factor,
                                const float* row_length, const float* column_length,
                                bool strictly, float* square) {
  for (int64_t i = 0; i < kChunk; ++i) {
    const float times = row_factor[i] * (row_length ? row_length[i] : 1.0f);
    const float* between = factors.between + i * kChunk;
    float* row = square + i * kChunk;
#pragma omp simd
    for (int64_t j = 0; j < kChunk; ++j) row[j] *= times * column_length[j] * between[j];
    if (strictly) row[i] = 0.0f;
  }
}

// The inverse of 1 + lower, row by row.
void invert(const float* lower, float* inverse) {
  for (int64_t i = 0; i < kChunk; ++i) {
    float row[kChunk] = {};
    row[i] = 1.0f;
    for (int64_t j = 0; j < i; ++j) {
      const float times = lower[i * kChunk + j];
      const float* other = inverse + j * kChunk;
#pragma omp simd
      for (int64_t k = 0; k < kChunk; ++k) row[k] -= times * other[k];
    }
    std::memcpy(inverse + i * kChunk, row, sizeof(row));
  }
}

// Computes a chunk's new values from its `value` and the state before it, which is kept, too.
void new_values(const Sizes& s, const Shared& shared, const element* value, const float* state,
                Workspace& work, const Kept& kept) {
  const int64_t keys = s.key_width(), width = s.value_width();
  const Factors& factors = work.factors;
  const Matrix key{shared.key, kChunk, keys};
  multiply(key, key.transposed(), work.square, false, work.operands);
  decay_products(factors, factors.write, shared.key_length, shared.key_length, true, work.square);
  invert(work.square, work.other_square);
  to_elements(work.other_square, kSquare, kept.inverse);
  to_elements(state, s.state(), kept.state);
  multiply(key, {kept.state, keys, width}, work.wide, false, work.operands);
  for (int64_t row = 0; row < kChunk; ++row) {
    const float write = factors.write[row], read = factors.read[row];
    const element* in = value + row * width;
    const float* known = work.wide + row * width;
    fill(width, kept.missing + row * width,
         [=](int64_t i) { return write * (to_float(in[i]) - read * known[i]); });
  }
  multiply({kept.inverse, kChunk, kChunk}, {kept.missing, kChunk, width}, work.wide, false,
           work.operands);
  to_elements(work.wide, kChunk * width, kept.made);
}

// Decays the state over a chunk and adds the chunk's new values.
void advance(const Sizes& s, const Shared& shared, const Kept& kept, Workspace& work,
             float* state) {
  const int64_t width = s.value_width();
  const float ended = work.factors.ended();
#pragma omp simd
  for (int64_t i = 0; i < s.state(); ++i) state[i] *= ended;
  scale_rows(kept.made, work.factors.stored, width, work.rounded);
  multiply(Matrix{shared.key, kChunk, s.key_width()}.transposed(), {work.rounded, kChunk, width},
           state, true, work.operands);
}

// The inputs of one sequence, from its first token on.
struct Sequence {
  const element* mixed;
  const float *write, *decay;
  const int64_t* starts;

  Sequence(const Sizes& s, int64_t number, const element* mixed_of, const float* write_of,
           const float* decay_of, const int64_t* starts_of)
      : mixed(mixed_of + number * s.length * s.mixed()),
        write(write_of + number * s.length * s.heads),
        decay(decay_of + number * s.length * s.heads),
        starts(starts_of ? starts_of + number * s.length : nullptr) {}

  void read(const Sizes& s, int64_t chunk, int64_t group, Shared& shared) const {
    shared.read(s, mixed + chunk * kChunk * s.mixed(), group, s.rows(chunk));
  }
  void read(const Sizes& s, int64_t chunk, int64_t head, const Shared& shared, Factors& factors,
            element* value) const {
    const int64_t before = chunk * kChunk, rows = s.rows(chunk);
    load(mixed + before * s.mixed() + 2 * s.groups * s.keys + head * s.values, s.mixed(), rows,
         s.values, value);
    factors.compute(s, shared, write + before * s.heads + head, decay + before * s.heads + head,
                    starts ? starts + before : nullptr, before, rows);
  }
};

void forward_group(const Sizes& s, const Sequence& in, int64_t group, element* out,
                   Scratch& scratch) {
  const int64_t keys = s.key_width(), width = s.value_width(), all = s.shared() * s.state();
  Shared shared(s, scratch);
  Workspace work(s, scratch);
  const Kept kept(s, scratch.take<element>(Kept::size(s)));
  auto* value = scratch.take<element>(kChunk * width);
  auto* states = scratch.take<float>(all);
  std::fill_n(states, all, 0.0f);
  const Matrix query{shared.query, kChunk, keys}, key{shared.key, kChunk, keys};
  for (int64_t chunk = 0; chunk < s.chunks(); ++chunk) {
    in.read(s, chunk, group, shared);
    for (int64_t each = 0; each < s.shared(); ++each) {
      const int64_t head = group * s.shared() + each;
      float* state = states + each * s.state();
      in.read(s, chunk, head, shared, work.factors, value);
      new_values(s, shared, value, state, work, kept);
      const Factors& factors = work.factors;
      multiply(query, {kept.state, keys, width}, work.wide, false, work.operands);
      for (int64_t row = 0; row < kChunk; ++row) {
        const float times = factors.query[row] * factors.carried[row];
        float* read = work.wide + row * width;
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) read[i] *= times;
      }
      multiply(query, key.transposed(), work.square, false, work.operands);
      decay_products(factors, factors.query, nullptr, shared.key_length, false, work.square);
      to_elements(work.square, kSquare, work.low);
      multiply({work.low, kChunk, kChunk}, {kept.made, kChunk, width}, work.wide, true,
               work.operands);
      store(work.wide, width, s.rows(chunk), s.values,
            out + (chunk * kChunk * s.heads + head) * s.values, s.heads * s.values);
      advance(s, shared, kept, work, state);
    }
  }
}

// Sums of a token's gradients of logarithms of its factors.
struct LogGradients {
  float query[kChunk], key[kChunk], write[kChunk], total[kChunk];
};

// From the gradient of a decayed product to that of the product itself, in `grad`; adds to the
// gradients of the logarithms, except the rows' own, which it returns in `rows`. `square` is the
// decayed product.
NOT_INLINED void product_gradient(const Factors& factors, const float* row_factor,
                                  const float* row_length, const float* column_length,
                                  bool strictly, const float* square, float* grad, float* rows,
                                  LogGradients& logs) {
  float columns[kChunk] = {};
  for (int64_t i = 0; i < kChunk; ++i) {
    const float times = row_factor[i] * (row_length ? row_length[i] : 1.0f);
    const float* between = factors.between + i * kChunk;
    const float* value = square + i * kChunk;
    float* row = grad + i * kChunk;
    // The diagonal is not decayed, and rounding its part would drown a small sum of the others.
    const float own = row[i] * value[i];
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < kChunk; ++j) {
      const float of_log = j == i ? 0.0f : row[j] * value[j];
      columns[j] += of_log;
      sum += of_log;
      row[j] *= times * column_length[j] * between[j];
    }
    if (strictly) row[i] = 0.0f;
    rows[i] = sum;
    logs.query[i] += own;
    logs.key[i] += own;
    logs.total[i] += sum;
  }
  for (int64_t j = 0; j < kChunk; ++j) {
    logs.key[j] += columns[j];
    logs.total[j] -= columns[j];
  }
}

// Memory for the gradients of a chunk.
struct Gradients {
  LogGradients logs;
  float *query, *key, *key_part, *made;
  element *out, *scaled_out, *missing, *reader, *end, *value;

  Gradients(const Sizes& s, Scratch& scratch)
      : query(scratch.take<float>(kChunk * s.key_width())),
        key(scratch.take<float>(kChunk * s.key_width())),
        key_part(scratch.take<float>(kChunk * s.key_width())),
        made(scratch.take<float>(kChunk * s.value_width())),
        out(scratch.take<element>(kChunk * s.value_width())),
        scaled_out(scratch.take<element>(kChunk * s.value_width())),
        missing(scratch.take<element>(kChunk * s.value_width())),
        reader(scratch.take<element>(kChunk * s.value_width())),
        end(scratch.take<element>(s.state())),
        value(scratch.take<element>(kChunk * s.value_width())) {}

  void begin(const Sizes& s) {
    std::fill_n(query, kChunk * s.key_width(), 0.0f);
    std::fill_n(key, kChunk * s.key_width(), 0.0f);
    std::fill_n(logs.query, kChunk, 0.0f);
    std::fill_n(logs.key, kChunk, 0.0f);
  }
};

// to += from; part[row] = the dot product of from's row and x's.
void add_part(const float* from, const element* x, int64_t width, float* to, float* part) {
  for (int64_t row = 0; row < kChunk; ++row, from += width, to += width, x += width) {
    part[row] = dot(from, x, width);
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) to[i] += from[i];
  }
}

// Adds to the gradients of queries and keys what passes through A and L. `square` is scratch.
void through_products(const Sizes& s, const Shared& shared, const Kept& kept, Workspace& work,
                      Gradients& grads) {
  const int64_t keys = s.key_width(), width = s.value_width();
  const Factors& factors = work.factors;
  const Matrix key{shared.key, kChunk, keys}, query{shared.query, kChunk, keys};
  const Matrix made{kept.made, kChunk, width}, low{work.low, kChunk, kChunk};
  float rows[kChunk];
  LogGradients& logs = grads.logs;
  // A is still in `square`.
  multiply({grads.out, kChunk, width}, made.transposed(), work.other_square, false,
           work.operands);
  product_gradient(factors, factors.query, nullptr, shared.key_length, false, work.square,
                   work.other_square, rows, logs);
  for (int64_t i = 0; i < kChunk; ++i) logs.query[i] += rows[i];
  to_elements(work.other_square, kSquare, work.low);
  multiply(low, key, grads.query, true, work.operands);
  multiply(low.transposed(), query, grads.key, true, work.operands);

  multiply(key, key.transposed(), work.square, false, work.operands);
  decay_products(factors, factors.write, shared.key_length, shared.key_length, true, work.square);
  multiply({grads.missing, kChunk, width}, made.transposed(), work.other_square, false,
           work.operands);
  for (int64_t i = 0; i < kSquare; ++i) work.other_square[i] = -work.other_square[i];
  product_gradient(factors, factors.write, shared.key_length, shared.key_length, true,
                   work.square, work.other_square, rows, logs);
  for (int64_t i = 0; i < kChunk; ++i) {
    logs.key[i] += rows[i];
    logs.write[i] += rows[i];
    float* sums = work.square + i * kChunk;
    for (int64_t j = 0; j < kChunk; ++j) {
      sums[j] = work.other_square[i * kChunk + j] + work.other_square[j * kChunk + i];
    }
  }
  to_elements(work.square, kSquare, work.low);
  multiply(low, key, grads.key, true, work.operands);
}

// From `end`, the gradient of the state after a chunk, to that of the state before it. Adds to the
// gradients of the queries and keys and of their logarithms; computes those of the values, into
// `work.wide`, and the other logarithms.
void backward_chunk(const Sizes& s, const Shared& shared, const Kept& kept, Workspace& work,
                    Gradients& grads, float* end) {
  const int64_t keys = s.key_width(), width = s.value_width(), last = kChunk - 1;
  const Factors& factors = work.factors;
  const Matrix key{shared.key, kChunk, keys}, query{shared.query, kChunk, keys};
  const Matrix state{kept.state, keys, width}, out{grads.out, kChunk, width};
  const Matrix scaled_out{grads.scaled_out, kChunk, width}, reader{grads.reader, kChunk, width};
  const Matrix rounded{work.rounded, kChunk, width}, low{work.low, kChunk, kChunk};
  LogGradients& logs = grads.logs;
  float part[kChunk], read_scale[kChunk];

  // What the outputs read of the state.
  for (int64_t i = 0; i < kChunk; ++i) read_scale[i] = factors.query[i] * factors.carried[i];
  scale_rows(grads.out, read_scale, width, grads.scaled_out);
  multiply(scaled_out, state.transposed(), grads.key_part, false, work.operands);
  add_part(grads.key_part, shared.query, keys, grads.query, part);
  for (int64_t i = 0; i < kChunk; ++i) {
    logs.query[i] += part[i];
    logs.total[i] = part[i];
  }

  // The new values, which the outputs read and the state stores.
  multiply(query, key.transposed(), work.square, false, work.operands);
  decay_products(factors, factors.query, nullptr, shared.key_length, false, work.square);
  to_elements(work.square, kSquare, work.low);
  multiply(low.transposed(), out, work.wide, false, work.operands);
  to_elements(end, s.state(), grads.end);
  multiply(key, {grads.end, keys, width}, grads.made, false, work.operands);
  for (int64_t row = 0; row < kChunk; ++row) {
    const float* stored = grads.made + row * width;
    const float* read = work.wide + row * width;
    const float times = factors.stored[row];
    fill(width, work.rounded + row * width,
         [=](int64_t i) { return read[i] + times * stored[i]; });
  }
  const Matrix inverse{kept.inverse, kChunk, kChunk};
  multiply(inverse.transposed(), rounded, work.wide, false, work.operands);
  for (int64_t row = 0; row < kChunk; ++row) {
    const int64_t at = row * width;
    const float write = factors.write[row], times = -write * factors.read[row];
    float* grad = work.wide + at;
    logs.write[row] = dot(grad, kept.missing + at, width);
    to_elements(grad, width, grads.missing + at);
    fill(width, grads.reader + at, [=](int64_t i) { return times * grad[i]; });
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) grad[i] *= write;
  }
  multiply(reader, state.transposed(), grads.key_part, false, work.operands);
  add_part(grads.key_part, shared.key, keys, grads.key, part);
  for (int64_t i = 0; i < kChunk; ++i) {
    logs.key[i] += part[i];
    logs.total[i] += part[i];
  }
  through_products(s, shared, kept, work, grads);

  // What the state stores. The last token is not decayed to the chunk's end.
  scale_rows(kept.made, factors.stored, width, work.rounded);
  multiply(rounded, Matrix{grads.end, keys, width}.transposed(), grads.key_part, false,
           work.operands);
  add_part(grads.key_part, shared.key, keys, grads.key, part);
  for (int64_t i = 0; i < kChunk; ++i) logs.key[i] += part[i];
  for (int64_t i = 0; i < last; ++i) {
    logs.total[i] -= part[i];
    logs.total[last] += part[i];
  }
  const float ended = factors.ended();
  logs.total[last] += ended * dot(end, kept.state, s.state());
#pragma omp simd
  for (int64_t i = 0; i < s.state(); ++i) end[i] *= ended;
  multiply(query.transposed(), scaled_out, end, true, work.operands);
  multiply(key.transposed(), reader, end, true, work.operands);
}

// The gradients' destinations, of one sequence.
struct Destination {
  element* mixed;
  float *write, *decay;
};

// Writes the gradients of a chunk's write strengths and decays.
void store_factors(const Sizes& s, const Factors& factors, const LogGradients& logs, int64_t rows,
                   float* write, float* decay) {
  float sum = 0;
  for (int64_t i = kChunk - 1; i >= 0; --i) {
    sum += logs.total[i];
    if (i < rows) {
      write[i * s.heads] = logs.write[i] * (1.0f - factors.write[i]);
      decay[i * s.heads] = sum;
    }
    if (factors.begins[i]) sum = 0;
  }
}

// Subtracts what a longer vector loses by its inverse length, and writes the gradients.
NOT_INLINED void store_normed(const element* x, const float* length, const float* log,
                              int64_t wide, int64_t rows, int64_t width, float* grad, element* to,
                              int64_t stride) {
  for (int64_t row = 0; row < rows; ++row) {
    const float pull = log[row] * length[row] * length[row];
    const element* in = x + row * wide;
    const float* part = grad + row * wide;
    fill(width, to + row * stride, [=](int64_t i) { return part[i] - pull * to_float(in[i]); });
  }
}

void backward_group(const Sizes& s, const Sequence& in, int64_t group, const element* grad_out,
                    const Destination& to, Scratch& scratch) {
  const int64_t keys = s.key_width(), width = s.value_width(), all = s.shared() * s.state();
  Shared shared(s, scratch);
  Workspace work(s, scratch);
  Gradients grads(s, scratch);
  auto* states = scratch.take<float>(all);
  auto* memory = scratch.take<element>(s.chunks() * s.shared() * Kept::size(s));
  const auto kept_of = [&](int64_t chunk, int64_t each) {
    return Kept(s, memory + (chunk * s.shared() + each) * Kept::size(s));
  };
  std::fill_n(states, all, 0.0f);
  for (int64_t chunk = 0; chunk < s.chunks(); ++chunk) {
    in.read(s, chunk, group, shared);
    for (int64_t each = 0; each < s.shared(); ++each) {
      float* state = states + each * s.state();
      in.read(s, chunk, group * s.shared() + each, shared, work.factors, grads.value);
      new_values(s, shared, grads.value, state, work, kept_of(chunk, each));
      advance(s, shared, kept_of(chunk, each), work, state);
    }
  }
  std::fill_n(states, all, 0.0f);
  for (int64_t chunk = s.chunks() - 1; chunk >= 0; --chunk) {
    const int64_t first = chunk * kChunk, rows = s.rows(chunk);
    element* mixed = to.mixed + first * s.mixed();
    in.read(s, chunk, group, shared);
    grads.begin(s);
    for (int64_t each = 0; each < s.shared(); ++each) {
      const int64_t head = group * s.shared() + each, at = first * s.heads + head;
      in.read(s, chunk, head, shared, work.factors, grads.value);
      load(grad_out + at * s.values, s.heads * s.values, rows, s.values, grads.out);
      backward_chunk(s, shared, kept_of(chunk, each), work, grads, states + each * s.state());
      store(work.wide, width, rows, s.values,
            mixed + 2 * s.groups * s.keys + head * s.values, s.mixed());
      store_factors(s, work.factors, grads.logs, rows, to.write + at, to.decay + at);
    }
    store_normed(shared.query, shared.query_length, grads.logs.query, keys, rows, s.keys,
                 grads.query, mixed + group * s.keys, s.mixed());
    store_normed(shared.key, shared.key_length, grads.logs.key, keys, rows, s.keys, grads.key,
                 mixed + (s.groups + group) * s.keys, s.mixed());
  }
}

template <typename Work>
int for_groups(const Sizes& s, int threads, Work work) {
  Tasks tasks;
#pragma omp parallel num_threads(threads)
  {
    Scratch scratch;
    begin_matmuls();
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < s.batch * s.groups; ++task) {
      tasks.run([&] {
        scratch.reset();
        work(task / s.groups, task % s.groups, scratch);
      });
    }
    end_matmuls();
  }
  return tasks.outcome();
}

}  // namespace

extern "C" {

// Computes out (batch, length, heads, values) from `mixed` (batch, length, queries of all groups,
// keys of all groups, values of all heads), the logits of the write strengths and the logarithms of
// the decays, (batch, length, heads) each. `starts` (batch, length) is the first token of each
// token's document, or null.
int TILEFORGE_KERNEL(delta_rule_forward)(const element* mixed, const float* write,
                                         const float* decay, const int64_t* starts, element* out,
                                         int64_t batch, int64_t length, int64_t groups,
                                         int64_t heads, int64_t keys, int64_t values,
                                         int threads) {
  const Sizes s{batch, length, groups, heads, keys, values};
  return for_groups(s, threads, [&](int64_t number, int64_t group, Scratch& scratch) {
    forward_group(s, Sequence(s, number, mixed, write, decay, starts), group,
                  out + number * length * heads * values, scratch);
  });
}

// Computes the gradients of the first three inputs, of their shapes.
int TILEFORGE_KERNEL(delta_rule_backward)(const element* mixed, const float* write,
                                          const float* decay, const int64_t* starts,
                                          const element* grad_out, element* grad_mixed,
                                          float* grad_write, float* grad_decay, int64_t batch,
                                          int64_t length, int64_t groups, int64_t heads,
                                          int64_t keys, int64_t values, int threads) {
  const Sizes s{batch, length, groups, heads, keys, values};
  return for_groups(s, threads, [&](int64_t number, int64_t group, Scratch& scratch) {
    const int64_t at = number * length;
    backward_group(s, Sequence(s, number, mixed, write, decay, starts), group,
                   grad_out + at * heads * values,
                   {grad_mixed + at * s.mixed(), grad_write + at * heads, grad_decay + at * heads},
                   scratch);
  });
}
}
