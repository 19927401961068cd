"""Protocol between a leader and its workers and frontends: joining (`join`), their links (`link`), and what leaders and
workers say (`work`, `inputs`). `protocol` is how messages of links are encoded."""
