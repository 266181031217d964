"""Eighteen faults that others hit, by number; each has tests of its own beside this file.

 1 over-long documents clog a packer; an all-PAD batch gives 0/0
 2 a rank without a real target sends NaN to all
 3 rows beyond the end of the last segment
 4 segments without rows
 5 an expert without tokens gets garbage gradients from an uninitialised buffer
 6 all experts without tokens
 7 Newton-Schulz on an all-zero gradient: 0/0
 8 Muon's momentum restored in another dtype, or dropped, on resume
 9 a second resume shifts the order of the documents again
10 a truncated checkpoint taken as the newest; a disk that fills while writing
11 JSONL with BOM, raw 0xff, lone surrogates, U+2028, CRLF, `text` missing or null
12 a config with one spelling of RoPE's base, read by a library that knows the other
13 the layout of the experts lost between versions of a library
14 text that contains the literal special tokens
15 a new graph compiled for every number of documents
16 a NaN loss that freezes the rule that skips steps, or is missed in the first ones
17 tokens per second divided by the wrong clock
18 published checkpoints that are secretly the same file
"""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]

# Tests elsewhere that hold against the same faults, in whole runs and with real processes.
ELSEWHERE = {
    1: ["data/test_prepare.py::test_each_rule_counts_its_documents",
        "data/test_packing.py::test_what_cannot_be_packed_is_named",
        "model/test_packing_exact.py::test_an_all_filler_window_adds_nothing_and_stays_finite"],
    2: ["train/test_resume.py::test_two_ranks_equal_one_process_that_accumulates"],
    3: ["data/test_stream.py::test_a_window_is_laid_out_as_defined"],
    5: ["model/test_experts.py::test_an_expert_without_rows_gets_zero_gradient"],
    7: ["optim/test_muon.py::test_an_all_zero_gradient_moves_nothing"],
    8: ["optim/test_groups.py::test_saved_state_continues_bit_for_bit"],
    9: ["train/test_resume.py::test_killed_and_resumed_ends_in_the_same_bytes",
        "data/test_stream.py::test_rejoining_at_any_window_equals_reading_from_the_start"],
    10: ["train/test_resume.py::test_a_damaged_checkpoint_is_passed_over",
         "train/test_contract.py::test_a_full_disk_is_one_line_and_keeps_what_was_there"],
    11: ["data/test_jsonl.py::test_accepted",
         "data/test_jsonl.py::test_refused_with_file_line_and_remedy"],
    12: ["export/test_export_directory.py::test_either_spelling_of_theta_is_enough"],
    13: ["export/test_export_directory.py::test_rows_go_where_the_library_expects_them"],
    14: ["export/test_export_tokenizer.py::test_the_check_sees_special_texts_turned_into_ids"],
    16: ["train/test_guard.py::test_bad_steps_change_nothing_and_enter_no_statistic",
         "train/test_guard.py::test_the_row_goes_on_over_a_resume_and_names_the_last_good_checkpoint"],
    17: ["train/test_clock.py::test_queued_steps_are_booked_where_they_were_made",
         "train/test_metrics.py::test_the_clock_counts_its_intervals_alone"],
    18: ["report/test_archive.py::test_equal_weights_are_refused",
         "train/test_contract.py::test_checkpoints_and_their_twins"],
}  # fmt: skip


def functions(path):
    """Names of the functions at a file's top level, found without importing it."""
    return [node.name for node in ast.parse(path.read_bytes()).body
            if isinstance(node, ast.FunctionDef)]  # fmt: skip


def test_each_fault_has_a_test_of_its_own_number():
    listed = {int(number) for number in re.findall(r"^ ?(\d+) ", __doc__, re.MULTILINE)}
    names = [name for path in Path(__file__).parent.glob("test_*.py") for name in functions(path)]
    tested = {int(found[1]) for name in names if (found := re.match(r"test_fault_(\d\d)_", name))}
    assert tested == listed == set(range(1, 19))


def test_the_tests_named_elsewhere_exist():
    for fault, tests in ELSEWHERE.items():
        for path, name in (test.split("::") for test in tests):
            assert name in functions(TESTS / path), f"fault {fault}: {path} has no {name}"
