// The calling convention of Python: one array of 64-bit words, each of which starts with an argument.
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>

template <class... A, size_t... I>
static void apply(void (*f)(A...), const int64_t* words, std::index_sequence<I...>) {
  auto argument = [&](auto x, size_t i) {
    memcpy(&x, words + i, sizeof x);
    return x;
  };
  f(argument(A(), I)...);
}
template <class... A>
static void apply(void (*f)(A...), const int64_t* words) {
  apply(f, words, std::index_sequence_for<A...>());
}
#define CALL(name, ...) \
  void name(const int64_t* words) { apply(__VA_ARGS__, words); }
