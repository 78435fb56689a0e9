// How Python calls a function: by a list of words, each of which begins with one argument.
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>

template <class... A, size_t... I>
static void apply(void (*f)(A...), const int64_t* words, std::index_sequence<I...>) {
  auto as = [&](auto x, size_t i) {
    memcpy(&x, words + i, sizeof x);
    return x;
  };
  f(as(A(), I)...);
}
template <class... A>
static void apply(void (*f)(A...), const int64_t* words) {
  apply(f, words, std::index_sequence_for<A...>());
}
#define CALL(name, ...) \
  void name(const int64_t* words) { apply(__VA_ARGS__, words); }
