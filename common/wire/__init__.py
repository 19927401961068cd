"""Protocol between a leader and its workers and frontends: joining (`join`), their links (`link`), and what leaders and
workers say (`work`, `inputs`). `channel` and `message` carry links and edges."""
