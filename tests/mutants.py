"""Plants faults, one at a time, and asks whether the test named for each finds it.

A test suite is worth what it would notice. Each fault is a change of text in a copy of the repository (the work tree is
never touched); its one named test must pass without the fault and fail by an assertion with it. A test that breaks
(an exception, a crash, a timeout) does not count: it would say nothing to a reader. A fault whose text is no longer
found once in its file is an error of its own.

    python tests/mutants.py                 all of them, a row each; exit code 1 unless all are found
    python tests/mutants.py drop_keeps_sum  these alone
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
COPIED = ("config", "engine", "evals", "pyproject.toml", "tests/conftest.py", "tests/engine")
COPIED += tuple(f"tests/evals/{name}.py" for name in ("sandbox_cases", "test_cell", "test_pass_at", "test_sandbox"))
TIMEOUT_S = 300  # one run; the decision compiles in about ten seconds
JOBS = min(2, os.cpu_count() or 1)

DECISION, EMULATOR, HOOK, RESIDENCY, TRACE_FILE = (
    f"engine/{name}.py" for name in ("decision", "emulator", "hook", "residency", "trace_file")
)
LINK, PACK, READERS, STORE = (f"engine/{name}.py" for name in ("link", "pack", "readers", "store"))
GOLDEN, LAWS, OF_EMULATOR, OF_HOOK, OF_TRACE_FILE = (
    f"tests/engine/test_{name}.py::" for name in ("decision_golden", "decision_laws", "emulator", "hook", "trace_file")
)
OF_CLOCK, OF_SCHEDULER = (f"tests/engine/test_{name}.py::" for name in ("prefetch_simulator", "scheduler"))
OF_LINK, OF_STORE = (f"tests/engine/test_{name}.py::" for name in ("link", "store"))
CHECKPOINT, CONVERSION, DIRECT, EXPERT_TENSORS, SKELETON = (
    f"engine/{name}.py" for name in ("checkpoint", "conversion", "direct", "expert_tensors", "skeleton")
)
ENGINE, KERNELS, PREFETCH, RECHECK = (
    f"engine/{name}.py" for name in ("offload_engine", "kernels", "prefetch", "recheck")
)
OF_ENGINE, OF_EXPERTS, OF_PREFETCH = (
    f"tests/engine/test_{name}.py::" for name in ("offload_engine", "experts", "prefetch_engine")
)
INSIDE, NAMESPACES, ROLES, SYSCALLS = (
    f"evals/cell/{name}.py" for name in ("inside", "namespaces", "roles", "syscalls")
)
OF_CELL, OF_PASS_AT, OF_SANDBOX = (f"tests/evals/test_{name}.py::" for name in ("cell", "pass_at", "sandbox"))
OF_CHECKPOINT, OF_SKELETON = (f"tests/engine/test_{name}.py::" for name in ("checkpoint", "skeleton"))


class Fault(NamedTuple):
    file: str
    old: str  # must occur once
    new: str
    test: str


FAULTS: dict[str, Fault] = {
    # ---- what is executed
    "rewritten_index_ignored": Fault(
        EMULATOR,
        "return self._execute(call, new_index, new_weights)",
        "return self._execute(call, index, new_weights)",
        OF_EMULATOR + "test_the_experts_computed_are_those_of_the_log[qwen3_moe-substitute_all]",
    ),
    "gate_and_up_halves_swapped": Fault(
        HOOK,
        "        return self.stock(self.module, self.hidden, index, weights)\n",
        """        halves = self.module.gate_up_proj.data
        self.module.gate_up_proj.data = halves.roll(halves.shape[1] // 2, dims=1)
        out = self.stock(self.module, self.hidden, index, weights)
        self.module.gate_up_proj.data = halves
        return out
""",
        OF_EMULATOR + "test_the_experts_computed_are_those_of_the_log[qwen3_moe-first_choice]",
    ),
    "prefill_counted_as_decoding": Fault(
        EMULATOR,
        "            if prefill:\n                continue\n",
        "",
        OF_EMULATOR + "test_a_request_is_prefill_and_then_decoding",
    ),
    "padding_counted_as_events": Fault(
        "engine/phase.py",
        "rows = np.flatnonzero(phase.valid)",
        "rows = np.arange(phase.valid.size)",
        OF_EMULATOR + "test_law_batched_lanes_are_each_sequence_alone[lanes0]",
    ),
    "selection_by_logits_without_the_bias": Fault(
        HOOK,
        "*chosen, scores, logits, router_input, layer.stock)",
        "*chosen, logits, logits, router_input, layer.stock)",
        OF_HOOK + "test_law_a_call_carries_what_the_model_chose[deepseek_v3]",
    ),
    "restart_of_one_lane_restarts_all": Fault(
        RESIDENCY,
        "rows = slice(lane * self.layers, (lane + 1) * self.layers)",
        "rows = slice(0, (lane + 1) * self.layers)",
        GOLDEN + "test_golden_restart_gives_a_lane_its_warm_start_back",
    ),
    # ---- traces
    "every_chunk_is_the_first": Fault(
        TRACE_FILE,
        " file.seek(place.start + first * place.row_bytes)",
        " file.seek(place.start)",
        OF_TRACE_FILE + "test_law_chunks_of_any_size_are_the_whole[7]",
    ),
    "stand_ins_of_unknown_score_not_counted": Fault(
        TRACE_FILE,
        "np.isneginf(scores) & (executed >= 0)",
        "np.isneginf(scores) & (executed < 0)",
        OF_TRACE_FILE + "test_law_with_the_best_e_minus_s_plus_k_every_stand_in_is_known",
    ),
    # ---- ranks and hits
    "router_order_taken_as_rank": Fault(
        DECISION,
        "order[work.rank[k]] = k",
        "order[k] = k",
        GOLDEN + "test_golden_threshold_on_an_unsorted_choice",
    ),
    "ties_to_the_higher_id": Fault(
        DECISION,
        "(chosen[t, o] < e)",
        "(chosen[t, o] > e)",
        GOLDEN + "test_golden_equal_scores_rank_by_lower_id",
    ),
    "raw_weights_as_g": Fault(
        DECISION,
        "g[rank] = events.weights[t, k] / total",
        "g[rank] = events.weights[t, k]",
        GOLDEN + "test_golden_threshold_reads_normalised_weights",
    ),
    "pending_counts_as_resident": Fault(
        DECISION,
        "if experts[chosen[t, k]].slot >= 0:",
        "if experts[chosen[t, k]].slot >= 0 or experts[chosen[t, k]].load_slot >= 0:",
        GOLDEN + "test_golden_fetching_a_pending_load_promotes_it",
    ),
    "stand_in_counts_as_a_hit": Fault(
        DECISION,
        "log.kind[t, k] = kind[rank]",
        "log.kind[t, k] = HIT if kind[rank] == SUBSTITUTE else kind[rank]",
        GOLDEN + "test_golden_a_stand_in_is_no_hit_and_no_demand",
    ),
    # ---- accounts and frozen residents
    "account_not_asked": Fault(
        DECISION,
        "if best == 0 or g[best] > left:",
        "if best == 0:",
        GOLDEN + "test_golden_few_heavy_waits_until_the_account_pays_for_the_heaviest",
    ),
    "heavy_taken_for_light": Fault(
        DECISION,
        "(g[k] >= rule.tau) == heavy:",
        "(g[k] >= rule.tau or not heavy):",
        LAWS + "test_law_heavy_and_light_keep_to_their_side_of_tau_and_off_the_first_choice"
        "[warm-many_light_next_best_frozen]",
    ),
    "paid_without_a_stand_in": Fault(
        DECISION,
        "                    else:\n                        kind[rank] = FETCH\n",
        "                    else:\n                        kind[rank] = FETCH\n"
        "                        row.account -= pays * g[rank]\n",
        GOLDEN + "test_golden_what_finds_no_stand_in_is_not_paid_for[frozen-PSPP-residents0]",
    ),
    "frozen_fetches": Fault(
        DECISION,
        "range(K if rule.eviction == 6 else 0)",
        "range(0)",
        GOLDEN + "test_golden_frozen_computes_a_miss_where_it_lies",
    ),
    "in_place_clears_the_missing_mass": Fault(
        DECISION,
        "if kind[rank] == HIT or kind[rank] == FETCH:",
        "if kind[rank] == HIT or kind[rank] == FETCH or kind[rank] == IN_PLACE:",
        GOLDEN + "test_golden_frozen_computes_a_miss_where_it_lies",
    ),
    # ---- slots
    "victim_from_slots_in_use": Fault(
        DECISION,
        "keys[experts[chosen[t, k]].slot] = np.inf",
        "keys[experts[chosen[t, k]].slot] += 0.0",
        GOLDEN + "test_golden_the_event_in_progress_loses_no_slot",
    ),
    "stand_in_from_slots_in_use": Fault(
        DECISION,
        "if work.keys[slot] == np.inf:",
        "if slots[slot].expert < 0:",
        GOLDEN + "test_golden_stand_ins_go_out_in_rank_order",
    ),
    "nearest_demand_leaves_first": Fault(
        DECISION,
        "return -np.float64(expert.next_use)",
        "return np.float64(expert.next_use)",
        LAWS + "test_law_belady_is_never_beaten[5-3]",
    ),
    "decay_ignored": Fault(
        DECISION,
        "expert.decayed += row.unit",
        "expert.decayed += 1.0",
        GOLDEN + "test_golden_lfu_decay_forgets",
    ),
    "unit_rescaled_without_its_counters": Fault(
        DECISION,
        "experts[e].decayed /= _RESCALE",
        "experts[e].decayed /= 1.0",
        LAWS + "test_law_rescaling_the_decayed_counters_changes_no_decision[fetch_lfu_decay]",
    ),
    "stand_in_recency_always": Fault(
        DECISION,
        "elif kind[rank] == SUBSTITUTE and rule.standin_recency:",
        "else:",
        GOLDEN + "test_golden_recency_of_stand_ins[no-1-1]",
    ),
    # ---- background
    "admission_one_step_early": Fault(
        DECISION,
        "expert.due = step + rule.delay if",
        "expert.due = step + rule.delay - 1 if",
        GOLDEN + "test_golden_background_with_a_delay_of_three",
    ),
    "missing_mass_kept_on_a_hit": Fault(
        DECISION,
        "            expert.missing_mass = 0.0\n            continue",
        "            expert.missing_mass *= kind[rank] == HIT\n            continue",
        GOLDEN + "test_golden_background_with_a_delay_of_three",
    ),
    "promotion_counted_as_a_second_load": Fault(
        DECISION,
        "n = _record(moves, n, step, e, slot, -1, PROMOTED)",
        "n = _record(moves, n, step, e, slot, -1, FETCHED)",
        GOLDEN + "test_golden_fetching_a_pending_load_promotes_it",
    ),
    "one_load_too_many_pends": Fault(
        DECISION,
        "row.pending < slots.size - K:",
        "row.pending <= slots.size - K:",
        GOLDEN + "test_golden_a_dropped_expert_leaves_no_room_for_another_load",
    ),
    # ---- weights
    "own_weights_not_rescaled": Fault(
        DECISION,
        "            rescale = True\n",
        "            rescale = False\n",
        GOLDEN + "test_golden_own_weights_of_a_softmax",
    ),
    "drop_not_renormalised": Fault(
        DECISION,
        "rescale = rescale or rule.renormalise",
        "rescale = False",
        GOLDEN + "test_golden_drop[yes-weights0]",
    ),
    # ---- how records travel
    "background_starts_during_a_fetch": Fault(
        LINK,
        "while not self._closed and (self._fetching or not self._next()):",
        "while not self._closed and not self._next():",
        OF_LINK + "test_nothing_starts_in_the_background_while_a_fetch_runs",
    ),
    "pieces_start_during_a_fetch": Fault(
        LINK,
        "while not self._closed and (self._fetching or not self._next()):",
        "while not self._closed and not self._next():",
        OF_LINK + "test_a_fetch_waits_for_the_piece_in_flight_and_for_no_other",
    ),
    "pieces_after_background_loads": Fault(
        LINK,
        "return self._agenda[0] if self._agenda else self._queue[0] if self._queue else None",
        "return self._queue[0] if self._queue else self._agenda[0] if self._agenda else None",
        OF_LINK + "test_prefetches_go_before_background_loads_which_are_not_broken_off",
    ),
    "former_agenda_goes_on": Fault(
        LINK,
        "            for prefetch in self._agenda:\n                prefetch.granted = 0\n",
        "            agenda = [*((p, p.granted) for p in self._agenda), *agenda]\n",
        OF_LINK + "test_a_new_agenda_replaces_the_former_and_the_piece_in_flight_ends",
    ),
    "fetch_beside_the_record_in_transit": Fault(
        LINK,
        "                while self._transit:\n                    self._turn.wait()\n",
        "",
        OF_LINK + "test_a_fetch_waits_for_the_record_in_transit_and_goes_before_the_queued_ones",
    ),
    "background_last_in_first_out": Fault(
        LINK,
        "self._queue.popleft()",
        "self._queue.pop()",
        OF_LINK + "test_background_records_pass_one_at_a_time_first_in_first_out",
    ),
    "what_is_resident_is_prefetched": Fault(
        "engine/scheduler.py",
        "if e < 0 or experts[target, e].slot >= 0 or experts[target, e].load_slot >= 0:",
        "if e < 0 or experts[target, e].load_slot >= 0:",
        OF_SCHEDULER + "test_golden_the_nearer_layer_first_then_by_claim_and_nothing_that_is_there",
    ),
    "a_window_for_every_candidate": Fault(
        "engine/scheduler.py",
        "used_s += granted * window.piece_s",
        "used_s += 0.0",
        OF_SCHEDULER + "test_golden_the_nearer_layer_first_then_by_claim_and_nothing_that_is_there",
    ),
    "a_piece_in_transit_counts_as_there": Fault(
        "engine/clock.py",
        "entry.left == 0 and (transit.layer < 0 or transit.entry != i)",
        "entry.left == 0",
        OF_CLOCK + "test_golden_one_prefetch[names6-always-piece6-2.0-0.0-prefetched6]",
    ),
    "what_is_there_in_part_is_fetched_whole": Fault(
        "engine/clock.py",
        "records -= 1.0 - _missing(",
        "records -= 0.0 * _missing(",
        OF_CLOCK + "test_golden_one_prefetch[names2-pieces-piece2-4.0-0.5-prefetched2]",
    ),
    "throttle_without_latency": Fault(
        LINK,
        "begin_s + limits.overhead_s",
        "begin_s",
        OF_LINK + "test_a_throttled_link_is_never_faster_than_its_limits[4-latency]",
    ),
    "bytes_of_failed_loads_counted": Fault(
        LINK,
        "        size = read_record(",
        "        self._journal.extend(_entry(begin_s, begin_s, 4096, foreground))\n        size = read_record(",
        OF_LINK + "test_a_failed_background_load_is_reported_and_its_bytes_do_not_count[device]",
    ),
    "interrupted_fetch_does_not_wait": Fault(
        READERS,
        "while batch.helpers:",
        "while False:",
        OF_LINK + "test_an_interrupted_fetch_returns_when_no_reader_writes_any_more[4]",
    ),
    # ---- the packed store
    "record_of_another_expert": Fault(
        STORE,
        "(layer * self.experts + expert) * self._record_bytes",
        "(expert * self.layers + layer) * self._record_bytes",
        OF_STORE + "test_a_record_lies_at_its_number_times_its_size",
    ),
    "noise_between_weights_packed": Fault(
        PACK,
        "buffer[:, begin:end] = 0",
        "pass",
        OF_STORE + "test_the_same_weights_give_the_same_bytes_and_others_another_identity",
    ),
    "half_a_store_left_behind": Fault(
        "engine/files.py",
        "shutil.rmtree(building, ignore_errors=True)",
        "pass",
        OF_STORE + "test_a_disk_that_fills_up_leaves_nothing[third write]",
    ),
    # ---- the engine
    "who_left_at_once_is_read_too": Fault(
        ENGINE,
        "wanted[int(self.slots.row_of_slot[layer, slot])] = expert, 0\n",
        "wanted.setdefault(int(self.slots.row_of_slot[layer, slot]), (expert, 0))\n",
        OF_ENGINE + "test_a_failed_background_load_is_reported_and_no_slot_claims_it[next_step]",
    ),
    "prefetched_part_taken_for_the_whole": Fault(
        PREFETCH,
        "first = self._parts[coming.here - 1][1]",
        "first = self._parts[-1][1]",
        OF_PREFETCH + "test_what_is_there_in_part_is_taken_and_the_rest_is_fetched",
    ),
    "prefetched_part_read_again": Fault(
        PREFETCH,
        "return Taken(row, left, first)",
        "return Taken(row, left, 0)",
        OF_PREFETCH + "test_what_is_there_in_part_is_taken_and_the_rest_is_fetched",
    ),
    "prefetched_row_stages_on": Fault(
        "engine/slots.py",
        "self.row_of_slot[layer, slot], self.staging_rows[number] = row, old",
        "self.row_of_slot[layer, slot] = row",
        OF_PREFETCH + "test_who_knows_the_future_takes_what_has_come_and_reads_nothing_twice[pieces-7-fetch_lfu_decay]",
    ),
    "prefetched_and_fetched_all_the_same": Fault(
        ENGINE,
        "taken = self.ahead.take(layer, expert, slot) if self.ahead and not due else None",
        "taken = None",
        OF_PREFETCH + "test_who_knows_the_future_takes_what_has_come_and_reads_nothing_twice[pieces-7-fetch_lfu_decay]",
    ),
    "log_decided_again_without_prefetches": Fault(
        RECHECK,
        "taken = self._experts_by_step(layer, TAKEN)",
        "taken = defaultdict(list)",
        OF_PREFETCH + "test_a_lossy_runs_log_forced_upon_the_emulator_gives_its_losses[rule_015-real]",
    ),
    "due_load_not_waited_for": Fault(
        ENGINE,
        "        if self.link.withdraw(transfer):\n            return False\n        if _ended_well(transfer):\n",
        "        if transfer.state != 'failed':\n",
        OF_ENGINE + "test_a_load_that_is_due_is_waited_for",
    ),
    "failed_load_leaves_its_claim": Fault(
        ENGINE,
        "        cancel_load(*(array[layer] for array in self.residency.state), expert)\n",
        "        complete_load(*(array[layer] for array in self.residency.state), expert)\n",
        OF_ENGINE + "test_a_failed_background_load_is_reported_and_no_slot_claims_it[real]",
    ),
    "prefill_fetches_what_is_here": Fault(
        ENGINE,
        "missing = [expert for expert in needed if rows[expert] == NOBODY]",
        "missing = needed",
        OF_ENGINE + "test_prefill_is_exact_and_leaves_the_scans_residents[7]",
    ),
    "load_that_arrived_in_a_prefill_only_issued": Fault(
        ENGINE,
        'arrived = set(state["expert"].tolist())',
        "arrived = set()",
        OF_ENGINE + "test_a_load_issued_and_completed_within_a_prefill_is_read[next_step]",
    ),
    "records_taken_for_contiguous_weights": Fault(
        KERNELS,
        "        start = rows[k] * stride + o * x.size\n        line = weight[start : start + x.size]\n"
        "        total = np.float32(0.0)\n        for i in range(x.size):\n            total += _number(line[i])",
        "        start = (rows[k] * outputs.shape[1] + o) * x.size\n        line = weight[start : start + x.size]\n"
        "        total = np.float32(0.0)\n        for i in range(x.size):\n            total += _number(line[i])",
        OF_EXPERTS + "test_a_decoded_token_gets_what_the_stock_experts_give[olmoe-torch.float32]",
    ),
    "recheck_believes_the_log": Fault(
        RECHECK,
        "            differing += not same",
        "            differing += 0",
        OF_ENGINE + "test_recheck_sees_a_forged_log",
    ),
    # ---- experts in place
    "neighbour_read_for_an_expert": Fault(
        EXPERT_TENSORS,
        "first.start + expert * nbytes, nbytes,",
        "first.start + (expert ^ 1) * nbytes, nbytes,",
        OF_CHECKPOINT + "test_agreement_every_layout_of_every_family[granitemoe-fused-single]",
    ),
    "gate_and_up_joined_the_other_way_round": Fault(
        CONVERSION,
        "for pattern in self.converter.source_patterns if pattern in self.keys]",
        "for pattern in self.converter.source_patterns[::-1] if pattern in self.keys]",
        OF_CHECKPOINT + "test_agreement_every_layout_of_every_family[qwen3_moe-original-single]",
    ),
    "gaps_of_a_record_left_as_they_were": Fault(
        CHECKPOINT,
        "            record[start:stop] = 0\n",
        "            pass\n",
        OF_CHECKPOINT + "test_law_what_belongs_to_no_parameter_is_zero",
    ),
    "one_buffer_for_all_threads": Fault(
        CHECKPOINT,
        "            buffer = self._buffers.pop()\n",
        "            buffer = self._buffers[0]\n",
        OF_CHECKPOINT + "test_law_threads_read_the_same_bytes",
    ),
    "direct_reads_claimed_where_there_are_none": Fault(
        DIRECT,
        "return os.open(path, flags, 0o666), True",
        "return os.open(path, flags, 0o666), False",
        OF_CHECKPOINT + "test_the_store_says_where_it_is_cached",
    ),
    "disk_read_through_the_page_cache": Fault(
        DIRECT,
        "flags | os.O_DIRECT, 0o666), False",
        "flags, 0o666), False",
        OF_CHECKPOINT + "test_disk_reads_leave_the_page_cache_as_it_was",
    ),
    "skeleton_in_training_dtype": Fault(
        SKELETON,
        "state[name] = _Lazy(partial(read_tensor, tensors[name]))",
        "state[name] = _Lazy(lambda dtype, stored=tensors[name]: read_tensor(stored, torch.float32))",
        OF_SKELETON + "test_agreement_casts_are_from_pretrained_s[disk0]",
    ),
    # ---- generated code
    "runs_without_consent": Fault(
        "evals/sandbox.py",
        'os.environ.get(OPT_IN) != "1"',
        "OPT_IN not in os.environ",
        OF_PASS_AT + "test_asked_for_without_consent_is_one_line[0]",
    ),
    "not_allowed_runs": Fault(
        "evals/pass_at.py",
        "if not allowed:",
        "if allowed is None:",
        OF_PASS_AT + "test_not_allowed_is_a_status_and_no_number",
    ),
    "completion_names_its_verdict": Fault(
        ROLES,
        'NoAnswer("out_of_memory" if kind == "MemoryError" else "failed"',
        'NoAnswer("out_of_memory" if kind == "MemoryError" else kind',
        OF_SANDBOX + "test_nothing_but_an_answer_passes[answers_that_it_passed]",
    ),
    "test_that_asks_nothing_passes": Fault(
        ROLES,
        "if calls else",
        "if job else",
        OF_SANDBOX + "test_a_test_that_asks_nothing_or_is_broken_is_refused[def check(f): pass]",
    ),
    "group_shared_with_the_launcher": Fault(
        INSIDE, "os.setsid()", "pass", OF_SANDBOX + "test_killing_everyone_in_reach_harms_nobody"
    ),
    "processor_time_not_looked_at": Fault(
        INSIDE, '>= limits["cpu_s"]', ">= 1e9", OF_SANDBOX + "test_nothing_but_an_answer_passes[cancels_the_timer]"
    ),
    "cell_outlives_its_launcher": Fault(
        NAMESPACES,
        'call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)',
        "pass",
        OF_SANDBOX + "test_when_its_launcher_is_killed_a_cell_ends",
    ),
    "shares_the_network": Fault(NAMESPACES, '"net": 0x40000000, ', "", OF_SANDBOX + "test_it_has_no_network"),
    "library_can_be_written": Fault(
        NAMESPACES,
        "flags = REMOUNT | BIND | READ_ONLY |",
        "flags = REMOUNT | BIND |",
        OF_SANDBOX + "test_it_writes_nowhere_but_in_its_own_folder",
    ),
    "keeps_capabilities": Fault(
        NAMESPACES,
        'call("capset", capability_header(), (ctypes.c_uint32 * 6)())',
        "pass",
        OF_SANDBOX + "test_it_may_not_mount_trace_nor_ask_for_rights",
    ),
    "any_call_is_allowed": Fault(
        SYSCALLS,
        "steps.append((RETURN, 0, 0, EPERM))",
        "steps.append((RETURN, 0, 0, ALLOW))",
        OF_CELL + "test_the_filter_allows_the_list_and_nothing_else[x86_64]",
    ),
}


def copy_repository(target: Path) -> Path:
    for name in COPIED:
        source = ROOT / name
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, target / name)
    return target


def plant(fault: Fault, copy: Path) -> str:
    """Write the fault into the copy; the sound text. ValueError if the fault's text does not occur exactly once."""
    path = copy / fault.file
    text = path.read_text(encoding="utf-8")
    if (found := text.count(fault.old)) != 1:
        raise ValueError(f"its text occurs {found} times in {fault.file}, expected once; mend FAULTS")
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    return text


def run_tests(copy: Path, tests: list[str]) -> dict[str, str]:
    """Outcome by test: `passed`, `assertion`, or what went wrong instead. The copy compiles from its own files."""
    report = copy / "report.xml"
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(copy / "numba"), "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "EXPERTMISS_EXPECT_SANDBOX": "1"}
    command = [sys.executable, "-m", "pytest", f"--junitxml={report}", "--no-header", *tests]
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return dict.fromkeys(tests, f"no answer within {TIMEOUT_S} s")
    if not report.exists():
        return dict.fromkeys(tests, f"pytest ended with {done.returncode}: {done.stdout[-300:]} {done.stderr[-300:]}")
    outcomes = dict.fromkeys(tests, "was not run: no such test")
    for case in ET.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname').replace('.', '/')}.py::{case.get('name')}"
        found = [child for child in case if child.tag in ("error", "failure", "skipped")]
        outcomes[name] = _outcome(found[0]) if found else "passed"
    return outcomes


def _outcome(child: ET.Element) -> str:
    message = " ".join((child.get("message") or "").split())
    if child.tag == "failure" and message.startswith(("AssertionError", "assert ")):
        return "assertion"
    return f"{child.tag}: {message[:200]}"


def try_fault(fault: Fault, copy: Path) -> tuple[str, float]:
    """(what happened, seconds); `found` is the only good answer. The copy is sound again afterwards."""
    started = time.monotonic()
    try:
        sound = plant(fault, copy)
    except ValueError as exc:
        return f"does not apply: {exc}", 0.0
    outcome = run_tests(copy, [fault.test])[fault.test]
    (copy / fault.file).write_text(sound, encoding="utf-8")
    said = {"assertion": "found", "passed": "NOT FOUND: the test passes"}.get(
        outcome, f"not by an assertion: {outcome}"
    )
    return said, time.monotonic() - started


def try_in_own_copy(fault: Fault, directory: Path) -> tuple[str, float]:
    """For faults in the decision, which must be compiled anew."""
    answer = try_fault(fault, copy_repository(directory))
    shutil.rmtree(directory)
    return answer


def try_sound_then(faults: dict[str, Fault], tests: list[str], directory: Path) -> tuple[dict[str, str], dict]:
    """All tests without a fault; then the faults outside the decision in the same copy, whose decision is compiled."""
    copy = copy_repository(directory)
    return run_tests(copy, tests), {name: try_fault(fault, copy) for name, fault in faults.items()}


def main(names: list[str]) -> int:
    if {"-h", "--help"} & set(names):
        print(f"{__doc__}\nfaults: {', '.join(FAULTS)}")
        return 0
    if unknown := set(names) - set(FAULTS):
        print(f"error: unknown faults {', '.join(sorted(unknown))}; known: {', '.join(FAULTS)}", file=sys.stderr)
        return 2
    faults = {name: FAULTS[name] for name in names or FAULTS}
    tests = sorted({fault.test for fault in faults.values()})
    light = {name: fault for name, fault in faults.items() if fault.file != DECISION}
    bad = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary, ThreadPoolExecutor(JOBS) as pool:
        directory = Path(temporary)
        rest = pool.submit(try_sound_then, light, tests, directory / "sound")
        heavy = {n: pool.submit(try_in_own_copy, f, directory / n) for n, f in faults.items() if n not in light}
        sound, answers = rest.result()
        width = max(map(len, faults)) + 2
        print(f"{'fault':<{width}}{'seconds':>7}  result, test", flush=True)
        for name, fault in faults.items():
            said, seconds = answers[name] if name in light else heavy[name].result()
            if sound[fault.test] != "passed":
                said = f"its test does not pass without it: {sound[fault.test]}"
            bad += said != "found"
            print(f"{name:<{width}}{seconds:7.0f}  {said}, {fault.test.removeprefix('tests/engine/')}", flush=True)
    print(f"{len(faults) - bad} of {len(faults)} faults found")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
