"""From hidden states to answers: pooling types, heads, poolers, and the plan that says what a request gets."""
