"""How operations launch kernels: Triton's (`launch_cache`, `precompile`, `ptxas_workaround`, `triton_call`), TileLang's
(`tilelang_call`, `tilelang_language`) and those of vendors' packages (`vendor`)."""
