// The head with a teacher: losses and gradients of rows of logits, in the layout of head.h.
#pragma once
#include "head.h"

// Calls f(offset in the logits, first token, tokens left) for each vector of the first `limit` tokens of row m.
template <class Function>
static void row_vectors(long m, long M, long vocab, long limit, Function f) {
  for (long first = 0; first < limit; first += VOCAB_CHUNK) {
    long padded = round_up(std::min(VOCAB_CHUNK, vocab - first), V), at = M * first + m * padded;
    for (long v = 0; v < padded && first + v < limit; v += V) f(at + v, first + v, limit - first - v);
  }
}

static inline long place(long id, long m, long M, long vocab) {
  long first = id / VOCAB_CHUNK * VOCAB_CHUNK;
  return M * first + m * round_up(std::min(VOCAB_CHUNK, vocab - first), V) + id - first;
}

static inline Floats only(Floats x, long left, float other) {
  return left >= V ? x : lane_index() < (int)left ? x : Floats{} + other;
}

static inline float largest(Floats x) {
  float max = -INFINITY;
  for (int i = 0; i < V; i++) max = std::max(max, x[i]);
  return max;
}

// ln of the sum of exp(scale x logit) over the first `limit` tokens of a row.
static float log_sum(const Number* logits, float scale, long m, long M, long vocab, long limit) {
  Floats maxima = Floats{} - INFINITY, sums = {};
  row_vectors(m, M, vocab, limit, [&](long at, long, long left) {
    maxima = maximum(only(load(logits + at), left, -INFINITY), maxima);
  });
  float max = largest(maxima);
  row_vectors(m, M, vocab, limit, [&](long at, long, long left) {
    sums += only(vec_exp2((load(logits + at) - max) * (scale * LOG2E)), left, 0);
  });
  return std::log(sum_lanes(sums)) + max * scale;
}

// Outcomes of M rows among the first `limit` tokens, M x (k + 1): the scaled logits of k ids, and ln of the sum of
// exp(scaled logit) over all others. Also the logit of the label, and with `with_sum` ln of the sum of exp(logit) over
// the vocabulary.
static void head_outcomes(float* outcomes, float* label_logits, float* log_sums, const Number* logits,
                          const int64_t* ids, const int64_t* labels, bool with_sum, float scale, long k, long M,
                          long vocab, long limit, int threads) {
#pragma omp parallel num_threads(threads) if (M * vocab > MIN_PARALLEL)
  {
    std::vector<float> row(round_up(vocab, V) + V);
#pragma omp for schedule(static)
    for (long m = 0; m < M; m++) {
      const int64_t* of_row = ids + m * k;
      float* out = outcomes + m * (k + 1);
      row_vectors(m, M, vocab, limit, [&](long at, long v, long left) {
        store(&row[v], only(load(logits + at), left, -INFINITY));
      });
      for (long i = 0; i < k; i++) out[i] = row[of_row[i]] * scale;
      for (long i = 0; i < k; i++) row[of_row[i]] = -INFINITY;
      Floats maxima = Floats{} - INFINITY, sums = {};
      for (long v = 0; v < limit; v += V) maxima = maximum(load(&row[v]), maxima);
      float max = largest(maxima);
      for (long v = 0; v < limit; v += V) {
        Floats x = load(&row[v]);
        sums += x == -INFINITY ? Floats{} : vec_exp2((x - max) * (scale * LOG2E));
      }
      out[k] = std::log(sum_lanes(sums)) + max * scale;
      label_logits[m] = load(logits + place(labels[m], m, M, vocab), 1)[0];
      if (with_sum) log_sums[m] = log_sum(logits, 1, m, M, vocab, vocab);
    }
  }
}

// Replaces the logits by a gradient: alpha (exp(logit - log_sum) - onehot(label)), without the exponential if `log_sums`
// is null; plus `grads` of the k ids, M x (k + 1); plus among the other tokens below `limit` the last of them times
// their fraction, exp(scaled logit - last outcome).
static void head_outcome_gradient(Number* logits, const float* outcomes, const float* grads, const float* log_sums,
                                  const int64_t* ids, const int64_t* labels, float alpha, float scale, long k, long M,
                                  long vocab, long limit, int threads) {
#pragma omp parallel num_threads(threads) if (M * vocab > MIN_PARALLEL)
  {
    std::vector<float> of_ids(k);
#pragma omp for schedule(static)
    for (long m = 0; m < M; m++) {
      const int64_t* of_row = ids + m * k;
      const float *out = outcomes + m * (k + 1), *grad = grads + m * (k + 1);
      for (long i = 0; i < k; i++) {
        of_ids[i] = grad[i];
        if (log_sums) of_ids[i] += alpha * std::exp(out[i] / scale - log_sums[m]);
      }
      row_vectors(m, M, vocab, vocab, [&](long at, long v, long left) {
        Floats x = load(logits + at), total = {};
        if (v < limit) total = only(vec_exp2((x * scale - out[k]) * LOG2E) * grad[k], limit - v, 0);
        if (log_sums) total += alpha * vec_exp2((x - log_sums[m]) * LOG2E);
        store(logits + at, only(total, left, 0));
      });
      for (long i = 0; i < k; i++) store(logits + place(of_row[i], m, M, vocab), Floats{} + of_ids[i], 1);
      float found = 0;
      bool stored = false;
      for (long i = 0; i < k && !stored; i++)
        if (of_row[i] == labels[m]) found = of_ids[i], stored = true;
      Number* label = logits + place(labels[m], m, M, vocab);
      if (!stored) found = load(label, 1)[0];
      store(label, Floats{} + (found - alpha), 1);
    }
  }
}

// -ln p(label) and T^2 KL(teacher, student) among the first `limit` tokens, M each, with scale = 1 / T. With
// `needs_grad` replaces the student's logits by the gradient of alpha times the first and 1 - alpha times the second.
static void head_kl(float* nlls, float* kls, Number* logits, const Number* teacher, const int64_t* labels,
                    bool needs_grad, float alpha, float scale, long M, long vocab, long teacher_vocab, long limit,
                    int threads) {
  bool one = scale == 1 && limit == vocab;
#pragma omp parallel num_threads(threads) if (M * vocab > MIN_PARALLEL)
  {
    std::vector<float> p(round_up(limit, V) + V);  // the teacher's logits, then its probabilities
#pragma omp for schedule(static)
    for (long m = 0; m < M; m++) {
      Floats maxima = Floats{} - INFINITY, student = maxima;
      row_vectors(m, M, teacher_vocab, limit, [&](long at, long v, long left) {
        Floats x = only(load(teacher + at), left, -INFINITY);
        store(&p[v], x);
        maxima = maximum(x, maxima);
      });
      row_vectors(m, M, vocab, limit, [&](long at, long, long left) {
        student = maximum(only(load(logits + at), left, -INFINITY), student);
      });
      float teacher_max = largest(maxima), max = largest(student);
      Floats teacher_sums = {}, sums = {}, products = {};
      row_vectors(m, M, vocab, limit, [&](long at, long v, long left) {
        Floats t = load(&p[v]) - teacher_max, s = load(logits + at) - max;
        Floats weight = only(vec_exp2(t * (scale * LOG2E)), left, 0);
        store(&p[v], weight);
        teacher_sums += weight;
        products += weight * only(t - s, left, 0);
        sums += only(vec_exp2(s * (scale * LOG2E)), left, 0);
      });
      float teacher_sum = sum_lanes(teacher_sums), log_z = std::log(sum_lanes(sums)) + max * scale;
      float log_sum_1 = one ? log_z : log_sum(logits, 1, m, M, vocab, vocab);
      float kl = sum_lanes(products) * scale / teacher_sum - std::log(teacher_sum) + (log_z - max * scale);
      Number* at_label = logits + place(labels[m], m, M, vocab);
      float label = load(at_label, 1)[0];
      nlls[m] = log_sum_1 < label ? 0 : log_sum_1 - label;  // a sum was rounded; NaN stays NaN
      kls[m] = kl < 0 ? 0 : kl / (scale * scale);
      if (!needs_grad) continue;
      float of_label = std::expm1(label - log_sum_1) * alpha, soft = (1 - alpha) / scale, to_p = soft / teacher_sum;
      if (labels[m] < limit) of_label += soft * std::exp(label * scale - log_z) - to_p * p[labels[m]];
      row_vectors(m, M, vocab, vocab, [&](long at, long v, long left) {
        Floats x = load(logits + at), total = {};
        if (v < limit) {
          Floats q = vec_exp2((x * scale - log_z) * LOG2E);
          total = only(q * (one ? soft + alpha : soft) - load(&p[v]) * to_p, limit - v, 0);
        }
        if (!one) total += alpha * vec_exp2((x - log_sum_1) * LOG2E);
        store(logits + at, only(total, left, 0));
      });
      store(at_label, Floats{} + of_label, 1);
    }
  }
}
