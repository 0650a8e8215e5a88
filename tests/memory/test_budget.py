"""Goal: what is admitted gets its pages, and what validation accepts is admitted. Method: SGLang's PrefillAdder, both ledgers."""

from __future__ import annotations

from inspect import unwrap
from types import SimpleNamespace

import pytest
from budget_calls import checked
from runtime_world import PAGE, Client, Sizes, World, make_world
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.managers.utils import validate_input_length

from sglang_hisparse.hooks import after_get_worker_info
from sglang_hisparse.residency import (
    Owner,
)


def adder_for(world: World, chunk: int | None = None) -> PrefillAdder:
    """One admission pass of an otherwise empty system."""
    return PrefillAdder(PAGE, world.tree, world.allocator, None, 1.0, 1 << 20, chunk)


def waiting(world: World, length: int, *, max_new_tokens: int = 64, ignore_eos: bool = False) -> Client:
    """A request that has looked up its prefix, as the scheduler has it when it asks for admission."""
    client = world.client(world.prompt(length, seed=length), max_new_tokens)
    client.req.sampling_params.ignore_eos = ignore_eos
    client.req.init_next_round_input(world.tree)
    return client


# ---- two ledgers -----------------------------------------------------------------------------------------------------


def test_either_ledger_alone_refuses() -> None:
    """Goal: logical tokens and device pages are both asked. Method: a request at each border, with the other one wide."""
    with make_world(Sizes(device_pages=12, ratio=4.0)) as world:
        budget = world.allocator.create_prefill_budget(world.tree)
        assert checked(budget, 11 * PAGE) and not checked(budget, 11 * PAGE + 1), (
            "twelve device pages, one to grow into"
        )
        assert checked(budget, PAGE, total=48 * PAGE - 1) and not checked(budget, PAGE, total=48 * PAGE)


def test_admitted_requests_are_charged_in_pages() -> None:
    """Goal: the second of a pass sees the first. Method: twelve device pages, prompts of five and of six pages."""
    with make_world(Sizes(device_pages=12)) as world:
        adder = adder_for(world)
        for length, fits in ((5 * PAGE, True), (6 * PAGE, False), (4 * PAGE, True)):
            client = waiting(world, length)
            result = adder.add_one_req(client.req, False, None)
            assert (client.req in adder.can_run_list) == fits, length
            assert fits or result is AddReqResult.NO_TOKEN
        assert adder.memory_budget.free_device_pages == 12 - 6 - 5


def test_running_requests_are_charged_at_their_worst() -> None:
    """Goal: a decoding request counts as lease, tail and one page, a prefilling one with its prompt. Method: both forms."""
    with make_world(Sizes(device_pages=24)) as world:
        client = world.client(world.prompt(10 * PAGE), max_new_tokens=500)
        world.extend(client, tokens=4 * PAGE)
        assert world.allocator.create_prefill_budget(world.tree).free_device_pages == 24 - 11
        world.publish(client)
        assert world.runtime.admission_may_have_room() is False
        world.extend(client)
        world.publish(client)
        assert world.allocator.create_prefill_budget(world.tree).free_device_pages == 24 - 5
        assert world.runtime.admission_may_have_room() is True and world.runtime.admission_may_have_room() is False
        world.finish(client)
        assert world.runtime.admission_may_have_room() is True and world.runtime.admission_may_have_room() is False


@pytest.mark.parametrize("max_new_tokens", [500, 100_000], ids=["bounded", "unbounded"])
def test_a_prefill_that_begins_and_ends_between_two_asks(max_new_tokens: int) -> None:
    """Goal: admission is asked again, though the sum has only risen since it was last asked. Method: a prompt in one chunk."""
    with make_world(Sizes(device_pages=24)) as world:
        assert world.runtime.admission_may_have_room() is False
        world.extend(world.client(world.prompt(10 * PAGE), max_new_tokens=max_new_tokens))
        assert world.runtime.committed_device_pages() == 5
        assert world.runtime.admission_may_have_room() is True and world.runtime.admission_may_have_room() is False


def test_cached_pages_do_not_count() -> None:
    """Goal: what can be spilled is free for admission. Method: a device full of cached pages, then a long prompt."""
    with make_world(Sizes(device_pages=12)) as world:
        world.finish(world.start(11 * PAGE))
        adder, client = adder_for(world), waiting(world, 10 * PAGE + 1)
        adder.add_one_req(client.req, False, None)
        assert adder.can_run_list == [client.req]
        world.tree.unlock(client.req.lock)
        client.req.lock = None
        world.extend(client)
        assert world.wrong_rows(client) == 0


# ---- chunks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("remaining", "limit", "chunk"), [(1261, 8192, 1216), (1261, 256, 256), (1261, 300, 256)])
def test_chunks_are_whole_pages(remaining: int, limit: int, chunk: int) -> None:
    """Goal: R18, a chunk never ends in a page because memory is short. Method: SGLang's remainder of 1,261 tokens."""
    with make_world() as world:
        budget = world.allocator.create_prefill_budget(world.tree)
        budget.total_offset = world.allocator.size - remaining
        assert budget.available_chunk_tokens(limit) == chunk and not budget.closed


def test_an_outgrown_estimate_does_not_stop_a_chunk() -> None:
    """Goal: a chunk goes on while pages exist, whatever was planned for others. Method: offsets beyond the pool."""
    with make_world() as world:
        budget = world.allocator.create_prefill_budget(world.tree)
        budget.total_offset = 2 * world.allocator.size
        assert budget.available_chunk_tokens(256) == 256 and not budget.has_capacity()


def test_a_parked_chunk_closes_the_pass() -> None:
    """Goal: nobody overtakes a parked chunk (R18). Method: no logical page is left; ask for every kind of admission."""
    with make_world(Sizes(device_pages=24, ratio=1.0)) as world:
        clients = [world.start(6 * PAGE, seed=seed) for seed in range(3)]
        chunked = world.client(world.prompt(9 * PAGE, seed=9))
        world.extend(chunked, tokens=6 * PAGE)
        world.publish(chunked)
        assert world.num_free_logical == 0
        adder = adder_for(world, chunk=256)
        assert adder.add_chunked_req(chunked.req) is chunked.req and adder.can_run_list == []
        budget = adder.memory_budget
        assert budget.closed and not budget.has_capacity() and not checked(budget, 1)
        assert not budget.can_allocate_prefill(paged_input=1, extend_input_len=1, max_new_tokens=1, chunk_limit=256)
        late = waiting(world, 10)
        assert adder.add_one_req(late.req, True, None) is AddReqResult.NO_TOKEN and adder.can_run_list == []
        for client in clients:
            world.finish(client, checkpoint=False)
        again = adder_for(world, chunk=256)
        assert again.add_chunked_req(chunked.req) is None and again.can_run_list == [chunked.req]


# ---- I8: what validation accepts, admission admits in an empty system ------------------------------------------------

SYSTEMS = {
    "device-bound": Sizes(device_pages=9, ratio=4.0),
    "equal": Sizes(device_pages=9, ratio=1.0),
    "smallest": Sizes(device_pages=5, ratio=1.0),
    "fractional": Sizes(device_pages=9, ratio=1.5, hot_pages=3),
    "streamed": Sizes(device_pages=9, ratio=4.0),
    "streamed on the smallest": Sizes(device_pages=5, ratio=4.0),
    "streamed in short chunks": Sizes(device_pages=7, ratio=3.0, hot_pages=3),
}


def accepted_limits(world: World) -> tuple[int, int]:
    """(max_req_len, max_req_input_len) that the scheduler gets from SGLang's worker through our hook."""
    from sglang.srt.managers.tp_worker import TpModelWorker

    worker = SimpleNamespace(
        model_runner=SimpleNamespace(
            effective_logical_max_total_num_tokens=world.allocator.size,
            logical_max_total_num_tokens=world.allocator.size,
            max_running_requests=8,
            token_to_kv_pool_allocator=world.allocator,
            forward_stream=None,
            req_to_token_pool=world.request_pool,
            token_to_kv_pool=world.pool,
        ),
        model_config=SimpleNamespace(context_len=1 << 20),
        dllm_algorithm=None,
        random_seed=0,
        device="cpu",
    )
    info = after_get_worker_info(unwrap(TpModelWorker.get_worker_info)(worker), worker)
    return info[4], info[5]


def clip_output(world: World, client: Client, max_req_len: int) -> None:
    """SGLang's own clip of the output length, run on what it reads of the scheduler."""
    from sglang.srt.managers.scheduler import Scheduler

    scheduler = SimpleNamespace(
        max_new_tokens_limit=None,
        max_req_len=max_req_len,
        max_total_num_tokens=world.allocator.size,
        kv_shard_widening=1,
        page_size=PAGE,
        token_to_kv_pool_allocator=world.allocator,
        sliding_window_size=None,
        chunked_prefill_size=128,
    )
    Scheduler.init_req_max_new_tokens(scheduler, client.req)


def run_alone(world: World, client: Client, chunk: int | None, steps: int) -> None:
    """Admit, prefill in the chunks that the adder grants, and decode to the end of the output, at most `steps` tokens."""
    is_first = True
    while is_first or client.req.prefix_len < len(client.req.origin_input_ids):
        adder = adder_for(world, chunk)
        if is_first:
            adder.add_one_req(client.req, False, None)
        else:
            adder.add_chunked_req(client.req)
        assert adder.can_run_list == [client.req], f"not admitted at {client.req.prefix_len} of its prompt"
        tokens = client.req.extend_end - client.req.prefix_len
        if is_first and client.req.lock is not None:
            world.tree.unlock(client.req.lock)
            client.req.lock = None
        world.extend(client, tokens=tokens)
        world.publish(client)
        is_first = False
    while len(client.req.output_ids) < min(client.req.sampling_params.max_new_tokens, steps):
        world.decode(client)
    world.finish(client, checkpoint=False)


@pytest.mark.parametrize("ignore_eos", [False, True], ids=["eos", "ignore-eos"])
@pytest.mark.parametrize(("radix", "chunk"), [(True, 128), (False, 128), (False, None)])
@pytest.mark.parametrize("system", SYSTEMS)
def test_what_is_accepted_is_admitted(system: str, radix: bool, chunk: int | None, ignore_eos: bool) -> None:
    """Goal: I8 at every border. Method: prompt lengths around each page border up to the limit, short and endless outputs."""
    streams = system.startswith("streamed")
    scratch = {"prefill_scratch_tokens": 1 << 20} if streams else {}
    with make_world(SYSTEMS[system], radix=radix, chunk=chunk, **scratch) as world:
        world.writes_rows = False
        max_req_len, limit = accepted_limits(world)
        device_tokens = world.allocator.device_tokens
        assert 2 * PAGE <= limit < max_req_len <= world.allocator.size
        assert (max_req_len > device_tokens) == (streams and world.runtime.extends.rule.longest_streamed_pages > 0)
        assert not streams or not radix or max_req_len > 2 * device_tokens
        borders = range(PAGE, limit + PAGE, PAGE)
        lengths = sorted({n for b in borders for n in (b - 1, b, b + 1)} | {1, limit - 1, limit})
        for length in [n for n in lengths if n <= limit]:
            for output, steps in ((1, 1), (1 << 20, 70 if length == limit or length == 2 * PAGE else 2)):
                client = waiting(world, length, max_new_tokens=output, ignore_eos=ignore_eos)
                assert validate_input_length(client.req, limit, True) is None
                clip_output(world, client, max_req_len)
                assert client.req.sampling_params.max_new_tokens >= 1
                run_alone(world, client, chunk, steps)
        assert (world.num_free_device, world.tree.evictable_size() + world.allocator.available_size()) == (
            world.sizes.device_pages - (0 if not radix else world.allocator.device_pages.count(Owner.RESIDENT)),
            world.allocator.size,
        )
