"""The values of server arguments that have a fixed set of them, of the SGLang that setup.py pins.

Written from `ServerArgs.add_cli_args`; tests/rollout/inference/sglang/test_sglang_live_arguments.py compares the two.
"""

_TEXT = """
tokenizer_mode: auto slow;
tokenizer_backend: huggingface fastokens;
load_format speculative_draft_load_format: auto pt safetensors npcache dummy sharded_state presharded gguf
    bitsandbytes mistral layered flash_rl remote remote_instance fastsafetensors private runai_streamer;
dtype: auto half float16 bfloat16 float float32;
quantization speculative_draft_model_quantization: awq fp8 mxfp8 gptq marlin gptq_marlin awq_marlin bitsandbytes gguf
    modelopt modelopt_fp8 modelopt_fp4 nvfp4_online modelopt_mixed petit_nvfp4 w8a8_int8 w8a8_fp8 moe_wna16 w4afp8
    mxfp4 auto-round auto-round-int8 compressed-tensors modelslim mxfp_w4a8 quark quark_int4fp8_moe quark_mxfp4 mlx_q4
    mlx_q8 unquant humming;
kv_cache_dtype: auto fp8_e5m2 fp8_e4m3 mxfp8 bf16 bfloat16 nvfp4 fp4_mx_block16 fp4_e2m1;
schedule_policy: lpm random fcfs dfs-weight lof priority routing-key;
retraction_policy: length priority;
radix_eviction_policy: lru lfu slru priority;
load_balance_method: auto round_robin follow_bootstrap_room total_requests total_tokens;
dcp_comm_backend: ag_rs a2a fi_a2a;
cp_strategy: zigzag interleave;
sampling_defaults: openai model;
log_requests_level: 0 1 2 3;
log_requests_format: text json;
attention_backend decode_attention_backend prefill_attention_backend: triton torch_native flex_attention dsa nsa dsv4
    compressed cutlass_mla fa3 fa4 flashinfer flashmla trtllm_mla cutedsl_mla tokenspeed_mla trtllm_mha
    dual_chunk_flash_attn hpc_ops aiter wave intel_amx ascend intel_xpu;
sampling_backend: flashinfer pytorch ascend;
grammar_backend: xgrammar outlines llguidance none;
mm_attention_backend: sdpa fa3 fa4 triton_attn ascend_attn aiter_attn flashinfer_cudnn amx_attn xpu_attn;
fp8_gemm_backend: auto deep_gemm flashinfer_trtllm flashinfer_cutlass flashinfer_deepgemm cutlass triton aiter;
fp4_gemm_backend: auto flashinfer_cudnn flashinfer_cutedsl flashinfer_cutlass flashinfer_trtllm marlin;
bf16_gemm_backend: auto cutedsl torch;
dsa_prefill_backend dsa_decode_backend nsa_prefill_backend nsa_decode_backend: flashmla_sparse flashmla_sparse_q8
    flashmla_kv flashmla_auto flashinfer_sparse_mla fa3 tilelang aiter trtllm;
dsa_paged_mqa_logits_backend: auto deepgemm cutedsl aiter;
dsa_topk_backend: sgl-kernel torch flashinfer;
mamba_backend: triton flashinfer;
cuda_graph_backend_decode cuda_graph_backend_prefill: full breakable tc_piecewise disabled;
cuda_graph_tc_compiler piecewise_cuda_graph_compiler: eager inductor;
flashinfer_allreduce_fusion_backend: auto trtllm mnnvl;
speculative_attention_mode: prefill decode;
speculative_moe_runner_backend moe_runner_backend: auto deep_gemm triton triton_kernel flashinfer_trtllm
    experimental_sgl_trtllm flashinfer_trtllm_routed flashinfer_cutlass flashinfer_mxfp4 flashinfer_cutedsl cutlass
    aiter marlin humming experimental_sgl_marlin hpc_ops;
speculative_moe_a2a_backend moe_a2a_backend: none deepep mooncake nixl mori ascend_fuseep flashinfer megamoe pplx
    ascend_tp;
decoupled_spec_role: null verifier drafter;
speculative_ngram_match_type: BFS PROB;
flashinfer_mxfp4_moe_precision: default bf16;
deepep_mode: auto normal low_latency;
fuseep_mode: 1 2;
deepep_dispatcher_output_dtype: auto bf16 fp8 int8 nvfp4;
ep_dispatch_algorithm: static dynamic fake lp;
expert_distribution_recorder_mode: stat stat_approx per_pass per_token;
elastic_ep_backend: none mooncake nixl;
elastic_ep_join_mode: scale recover;
mamba_ssm_dtype: float32 bfloat16 float16;
mamba_radix_cache_strategy: auto no_buffer extra_buffer extra_buffer_lazy;
linear_attn_backend linear_attn_decode_backend linear_attn_prefill_backend: triton cutedsl flashinfer flashkda
    nvidia_kda ptx_kda;
linear_attn_verify_backend: triton cutedsl flashinfer flashkda nvidia_kda ptx_kda nv_cutedsl;
hicache_write_policy: write_back write_through write_through_selective;
hicache_io_backend: direct kernel kernel_ascend;
hicache_mem_layout: layer_first page_first page_first_direct page_first_kv_split page_head;
hicache_storage_backend: file mooncake hf3fs nixl aibrix dynamic eic simm mori shm;
hicache_storage_prefetch_policy: best_effort wait_complete timeout;
mm_feature_transport: cpu cuda_ipc;
lora_target_modules: q_proj k_proj v_proj o_proj q_a_proj kv_a_proj_with_mqa q_b_proj kv_b_proj wq_b wk weights_proj
    gate_proj up_proj down_proj qkv_proj gate_up_proj embed_tokens lm_head qkvr wo_ud all;
lora_eviction_policy: lru fifo;
lora_backend: triton csgmv ascend torch_native;
max_lora_chunk_size: 16 32 64 128;
disaggregation_mode: null prefill decode;
disaggregation_transfer_backend: mooncake nixl ascend fake mori mooncake_tcp;
encoder_transfer_backend: auto zmq_to_scheduler zmq_to_tokenizer mooncake;
remote_instance_weight_loader_backend: transfer_engine nccl modelexpress;
rl_on_policy_target: fsdp;
kv_canary: none log raise;
return_hidden_states_mode: last full;
weight_cache_mode: off daemon client;
reasoning_parser: auto apertus2509 deepseek-r1 deepseek-v3 deepseek-v4 glm45 hunyuan gpt-oss kimi kimi_k2 kimi_k3 mimo
    poolside_v1 qwen3 qwen3-thinking minimax minimax-append-think minimax-m3 step3 step3p5 mistral nemotron_3 interns1
    gemma4 inkling cohere_command4;
tool_call_parser: auto apertus2509 cohere_command4 deepseekv3 deepseekv31 deepseekv32 deepseekv4 glm glm45 glm47
    gpt-oss kimi_k2 kimi_k3 lfm2 llama3 mimo minicpm5 mistral poolside_v1 pythonic qwen qwen25 qwen3_coder step3
    step3p5 minimax-m2 minimax-m3 trinity interns1 hermes hunyuan gigachat3 gemma4 inkling;
kv_canary_real_data: none partial all;
dsa_prefill_cp_mode nsa_prefill_cp_mode: in-seq-split round-robin-split;
prefill_cp_mode: in-seq-split
"""
CHOICES = {
    name: tuple(values.split())
    for names, _, values in (entry.partition(":") for entry in _TEXT.split(";"))
    for name in names.split()
}
"""Argument -> the values that it takes; of a list, each of its items."""
