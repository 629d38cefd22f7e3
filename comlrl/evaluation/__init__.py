"""Trees go in; metrics, pass@k, intervals, baselines and cross-play come out."""
