// Closed forms. Source: arXiv 2211.17192, equation 1 and theorem 3.8; with a round trip in every pass.

// Tokens per pass of a chain of k tokens, each accepted with probability a.
function expectedTokens(a, k) {
  let total = 0;
  for (let depth = 0; depth <= k; depth += 1) total += a ** depth;
  return total;
}

// Plain seconds / speculative seconds; r is the round trip divided by a pass, c a drafted level divided by a pass.
function speedUp(a, k, c, r) {
  return ((1 + r) * expectedTokens(a, k)) / (k * c + 1 + r);
}

// The length with the best speed-up, the shortest among equals.
function bestLength(a, c, r, longest) {
  let best = 0;
  for (let k = 1; k <= longest; k += 1) if (speedUp(a, k, c, r) > speedUp(a, best, c, r)) best = k;
  return best;
}
