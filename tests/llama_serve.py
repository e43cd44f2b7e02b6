"""llama.cpp's own HTTP server on a GGUF file, of the environment that has xllamacpp: FILE PORT ANSWERS."""

import sys
import threading

import xllamacpp

file, port, answers = sys.argv[1:]
params = xllamacpp.CommonParams()
params.model.path = file
params.port = int(port)
params.n_parallel = int(answers)
params.n_ctx = 256 * int(answers)
params.cpuparams.n_threads = 1
params.warmup = False
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
threading.Event().wait()
