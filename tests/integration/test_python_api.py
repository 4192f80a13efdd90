"""The Python API with clusters of its own: the client's outputs, and nothing left behind."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import psutil
import pytest

from rhizome import LLM, AsyncLLM, ClusterError, GenerationError, SamplingParams
from tests.helpers_models import make_checkpoint
from tests.integration.cluster import ROOT, left_in_shared_memory, wait_until

DEMO = ROOT / "demo_model"
PROMPTS = ["Return a copy of the string", "Raise ValueError if", "The with statement is used to"]
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_checkpoint("llama", tmp_path_factory.mktemp("m") / "llama")


def processes(llm):
    return [psutil.Process(pid) for pid in llm._own.info["pids"].values()]


def check_gone(found, run_dir):
    _, alive = psutil.wait_procs(found, timeout=20)
    assert not alive
    wait_until(lambda: not run_dir.exists(), 10)


def test_outputs_are_those_of_the_client_and_nothing_is_left():
    shared_memory = set(Path("/dev/shm").iterdir())
    with LLM(DEMO, tp=2, dtype="float32") as llm:
        found, run_dir = processes(llm), llm._own.run_dir
        outputs = llm.generate(PROMPTS, PARAMS)
        streamed = ["".join(p.text for p in llm.stream(prompt, PARAMS)) for prompt in PROMPTS]
        chat = llm.chat([{"role": "user", "content": "hi"}], PARAMS)[0]
        stopping = SamplingParams(temperature=0.0, max_tokens=24, stop=["e"], prompt_logprobs=1)
        (whole,), pieces = llm.generate(PROMPTS[0], stopping), list(llm.stream(PROMPTS[0], stopping))
        assert whole.outputs[0].stop_reason == pieces[-1].stop_reason == "e" and whole.prompt_logprobs
        assert [p.prompt_logprobs for p in pieces] == [whole.prompt_logprobs] + [None] * (len(pieces) - 1)

        async def beside():
            async with AsyncLLM.connect(run_dir) as other:
                return await other.generate(PROMPTS, PARAMS)

        concurrent = asyncio.run(beside())
        assert LLM.connect(run_dir).generate(PROMPTS[0], PARAMS)[0].outputs == outputs[0].outputs
        for prompt, output, text, again in zip(PROMPTS, outputs, streamed, concurrent, strict=True):
            answer = client(run_dir, prompt)
            (own,) = output.outputs
            assert (own.text, own.token_ids, own.finish_reason) == (answer["text"], answer["token_ids"], "length")
            assert output.prompt_tokens == answer["prompt_tokens"] and text == own.text
            assert again.outputs == output.outputs
        assert client(run_dir, "hi", "--chat")["token_ids"] == chat.outputs[0].token_ids
    check_gone(found, run_dir)
    assert not left_in_shared_memory(shared_memory)


TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
CALL = {"id": "abc123def", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
CHAT = [
    {"role": "user", "content": [{"type": "text", "text": "How is it in Rome?"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "21 degrees", "tool_call_id": "abc123def"},
]


def test_chats_with_tools_are_those_of_http():
    greedy = SamplingParams(temperature=0.0, max_tokens=16)
    with LLM(DEMO, dtype="float32", port=0) as llm:
        url = llm._own.info["addresses"]["http"]
        begun = [*CHAT, {"role": "assistant", "content": "It is"}]
        for messages, options in ((CHAT, {"tools": TOOLS}), (begun, {"tools": TOOLS, "continue_final_message": True})):
            (found,) = llm.chat(messages, greedy, **options)
            body = {"messages": messages, "temperature": 0.0, "max_tokens": 16, **options}
            theirs = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
            assert found.prompt_tokens == theirs["usage"]["prompt_tokens"]
            assert found.outputs[0].text == theirs["choices"][0]["message"]["content"]
            assert "".join(piece.text for piece in llm.stream(messages, greedy, **options)) == found.outputs[0].text
        assert found.prompt_tokens > llm.chat(begun, PARAMS, continue_final_message=True)[0].prompt_tokens + 20
        with pytest.raises(GenerationError, match=r"messages\[0\].tool_calls\[0\].function: is missing"):
            llm.chat([{"role": "assistant", "tool_calls": [{}]}])
        with pytest.raises(GenerationError, match=r"chat_template_kwargs\.x: this model's chat template does not use"):
            llm.chat(CHAT, chat_template_kwargs={"x": 1})


def client(run_dir, prompt, *flags):
    """What client.py prints, with the parameters of PARAMS."""
    command = [sys.executable, str(ROOT / "client.py"), prompt, *flags, "--run-dir", str(run_dir), "--json"]
    command += ["--temperature", "0.8", "--seed", "3", "--max-tokens", "24", "--ignore-eos"]
    return json.loads(subprocess.run(command, capture_output=True, check=True, timeout=120).stdout)


SCRIPT = """
import os, sys
from rhizome import LLM, SamplingParams
llm = LLM(sys.argv[1], kv_tokens=1024)
pid = os.fork() if sys.argv[2] == "fork" else -1  # a forked child must not keep the cluster alive
if pid == 0:
    os.close(1)
    sys.stdin.read()
    os._exit(0)
print(llm._own.run_dir, pid, *llm._own.info["pids"].values(), flush=True)
if sys.argv[2] == "leave":
    sys.stdin.read()
    sys.exit()
llm.generate([[5, 6, i] for i in range(50)], SamplingParams(max_tokens=90, ignore_eos=True))
sys.stdin.read()
"""


def start(llama, how):
    """A program that starts an LLM; returns it, the run directory and all processes of the cluster. It has no `if
    __name__` guard."""
    path = Path(tempfile.mkdtemp()) / "program.py"
    path.write_text(SCRIPT)
    program = subprocess.Popen(
        [sys.executable, str(path), str(llama), how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    run_dir, fork, *pids = program.stdout.readline().split()
    forked = [psutil.Process(int(fork))] if how == "fork" else []
    path.unlink()
    path.parent.rmdir()
    return program, Path(run_dir), [psutil.Process(int(pid)) for pid in pids], forked


@pytest.mark.parametrize("how", ["kill", "fork", "leave", "terminate"])
def test_the_cluster_ends_with_the_program_however_that_ends(llama, how):
    program, run_dir, found, forked = start(llama, how)
    try:
        assert len(found) == 5 and run_dir.is_dir()
        if how == "terminate":
            program.terminate()
        elif how == "leave":
            program.stdin.close()
        else:
            program.send_signal(signal.SIGKILL)
        program.wait(30)
        check_gone(found, run_dir)
        assert all(process.is_running() for process in forked)
    finally:
        program.kill()
        program.stdin.close()
        program.stdout.read()
        program.wait()
        for process in [*forked, *found]:
            if process.is_running():
                process.kill()


def test_ctrl_c_ends_the_call_and_not_the_cluster(llama):
    """As in a terminal: the signal goes to the whole process group."""
    code = """
import os, signal, sys, threading
from rhizome import LLM, SamplingParams
with LLM(sys.argv[1], kv_tokens=4096) as llm:
    stream = llm.stream([5, 6], SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    try:
        os.killpg(0, signal.SIGINT)
        for _ in stream: pass
    except KeyboardInterrupt:
        stream.close()
    print(len(llm.generate([5, 6], SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(llama)], capture_output=True, text=True, timeout=120, start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.stdout == "3\n", done.stderr


def test_what_goes_wrong_is_told(llama, tmp_path):
    with pytest.raises(ClusterError, match=r"no config\.json"):
        LLM(tmp_path)
    with pytest.raises(ClusterError, match="No such option '--frobnicate'"):
        LLM(llama, frobnicate=1)
    with LLM(llama, kv_tokens=1024, restarts=0) as llm:
        psutil.Process(llm._own.info["pids"]["worker-0"]).kill()
        with pytest.raises(ClusterError, match="worker-0 was killed by SIGKILL"):
            llm.generate([5, 6], SamplingParams(max_tokens=500, ignore_eos=True))
    with pytest.raises(ClusterError, match="closed"):
        llm.generate([5])


@pytest.mark.parametrize("victim", ["worker-0", "tokenizer"])
def test_calls_go_on_after_a_process_died_between_them(llama, victim):
    """It may take a moment in which a call is refused or finds nobody, but the same object goes on."""
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)

    def kill():
        process = psutil.Process(json.loads((llm._own.run_dir / "cluster.json").read_text())["pids"][victim])
        process.kill()
        psutil.wait_procs([process], timeout=20)

    def same():
        try:
            return llm.generate([5, 6, 7], params)[0].outputs == expected
        except (ClusterError, GenerationError):
            return False

    async def same_async():
        async with AsyncLLM.connect(llm._own.run_dir) as other:
            assert (await other.generate([5, 6, 7], params))[0].outputs == expected
            kill()
            async with asyncio.timeout(30):
                while True:
                    try:
                        return (await other.generate([5, 6, 7], params))[0].outputs == expected
                    except (ClusterError, GenerationError):
                        await asyncio.sleep(0.05)

    with LLM(llama, kv_tokens=1024) as llm:
        expected = llm.generate([5, 6, 7], params)[0].outputs
        kill()
        wait_until(same, 30)
        assert asyncio.run(same_async())


def test_async_llm_owns_its_cluster(llama):
    async def use():
        async with AsyncLLM(llama, kv_tokens=1024) as llm:
            found, run_dir = processes(llm), llm._own.run_dir
            pieces = [piece async for piece in llm.stream([5, 6, 7], SamplingParams(max_tokens=5, ignore_eos=True))]
            assert sum(len(piece.token_ids) for piece in pieces) == 5
        return found, run_dir

    check_gone(*asyncio.run(use()))
