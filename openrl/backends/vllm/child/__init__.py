"""Runs vLLM for a sampler of openrl, under the interpreter that has vLLM: nothing here imports anything of openrl.

Started by its path, as a folder (`__main__`). Frames go over stdin and stdout: four bytes of length, most significant
first, then JSON. The first frame in says what to open (`openrl.backends.vllm.plan.Opening`); then come

    {"op": "adapter", "id", "name", "folder"}      load an adapter; ids and names are never used twice
    {"op": "forget", "id"}                         unload it
    {"op": "weights", "folder"}                    put other weights in the place of the model's; nothing is under way.
                                                   All adapters are forgotten. None: those that it was opened with
    {"op": "draw", "key", "prompt", "adapter", "seed", "temperature", "top_p", "top_k", "max_tokens", "stop", "top",
     "stream"}                                     draw one sequence; `stop` are token ids, `stream`: tell every token
    {"op": "cancel", "keys"}                       give sequences up

and frames out are

    {"op": "ready", "vllm", "can", "kv_tokens"}    or {"op": "unusable", "error"}, after which it ends
    {"op": "adapter", "id", "error"}               the adapter cannot be loaded
    {"op": "loading"}                              weights are being read: no other sign of life until they are
    {"op": "weights", "error", "able", "whole"}    they are in place if there is no error and this vLLM is `able` to
                                                   exchange weights. Else the model's own are back if it is `whole`;
                                                   if not, nobody knows what the model holds
    {"op": "drawn", "parts": [[key, tokens, logprobs, tops, ended], ...], "steps", "seconds"}
    {"op": "failed", "key", "error"}               this sequence cannot be drawn
    {"op": "alive", "steps", "seconds"}            a sign of life of the thread that computes

`steps` and `seconds` are those of the engine since the last frame that had them.

It ends when its stdin does: the worker that started it is gone.
"""
