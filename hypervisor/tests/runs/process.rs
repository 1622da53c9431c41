//! Runs programs at `process` placement on the CPU device.

use crate::harness::{
    Finished, alone, demo_programs, finish, nothing_is_left, per_thread_programs, program, wormhole,
};
use crate::waiters::are_released_after_detection;

/// Runs one program and asserts that it verified its own results and left no process behind.
fn passes(link: &str, name: &str) -> Finished {
    passes_on("cpu", link, name)
}

/// Runs one program as [`passes`] does, on these devices.
fn passes_on(devices: &str, link: &str, name: &str) -> Finished {
    passes_with(devices, None, link, name)
}

/// Runs one program as [`passes_on`] does, with `visible` as CUDA_VISIBLE_DEVICES.
fn passes_with(devices: &str, visible: Option<&str>, link: &str, name: &str) -> Finished {
    let _alone = alone();
    let path = program(link, name);
    let mut run = wormhole(&["run", "--placement", "process", "--device", devices, "--"]);
    if let Some(visible) = visible {
        run.env("CUDA_VISIBLE_DEVICES", visible);
    }
    let run = finish(run.arg(path));
    assert!(
        run.status.success(),
        "{name}: {:?}\n{}\n{}",
        run.status,
        run.stdout,
        run.stderr
    );
    assert!(
        run.stdout.contains(&format!("PASS {name}")),
        "{name} said: {}",
        run.stdout
    );
    nothing_is_left();
    run
}

/// Programs that call functions which the runtime of CUDA 12.1 lacks.
pub const AFTER_12_1: [&str; 1] = ["graphs"];

/// Runs a program compiled by CUDA 12.4 with an earlier and a later runtime.
fn passes_with_other_runtimes(name: &str) {
    if !AFTER_12_1.contains(&name) {
        passes("cuda12.1", name);
    }
    passes("cuda12.9", name);
}

macro_rules! programs_pass {
    ($($name:ident)*) => {$(
        mod $name {
            #[test]
            fn with_the_static_runtime() {
                super::passes("static", stringify!($name));
            }

            #[test]
            fn with_the_shared_runtime() {
                super::passes("shared", stringify!($name));
            }

            #[test]
            fn of_cuda_12() {
                super::passes("cuda12", stringify!($name));
                super::passes_with_other_runtimes(stringify!($name));
            }

            #[test]
            fn of_cuda_11() {
                super::passes("cuda11", stringify!($name));
            }
        }
    )*};
}

demo_programs!(programs_pass);

#[test]
fn managed_variables_are_reached_by_both_sides() {
    passes("static", "managed_variables");
    passes("shared", "managed_variables");
    passes_on("cpu:2", "static", "managed_variables");
}

macro_rules! programs_pass_per_thread {
    ($($name:ident)*) => {
        /// Programs built for per-thread default streams, for which the API has separate function names.
        mod per_thread {$(
            #[test]
            fn $name() {
                super::passes("per-thread", stringify!($name));
            }
        )*}
    };
}

per_thread_programs!(programs_pass_per_thread);

#[test]
fn managed_memory_is_reached_by_both_sides() {
    passes("static", "managed");
}

#[test]
fn managed_memory_changes_sides_and_every_byte_is_right() {
    passes("static", "residence");
}

#[test]
fn kernels_of_an_image_and_launches_of_every_kind() {
    passes("static", "kernels");
}

#[test]
fn launches_record_events_that_are_reached_while_they_run() {
    passes("static", "launch_events");
    passes_on("cpu:2", "static", "launch_events");
}

#[test]
fn contexts_that_a_program_creates() {
    passes("static", "contexts");
}

#[test]
fn threads_wait_as_the_flags_of_contexts_and_events_say() {
    passes("static", "waits");
}

#[test]
fn registered_memory_is_reached_in_place_while_it_is_written() {
    passes("static", "registered");
}

#[test]
fn registered_memory_loses_no_write_of_threads_and_system_calls() {
    passes("static", "registered_load");
}

#[test]
fn registered_files_are_reached_by_the_devices_of_two_processes() {
    passes("static", "shared_files");
}

#[test]
fn a_killed_process_leaves_the_files_that_it_registered_to_the_others() {
    passes("static", "shared_files_killed");
}

#[test]
fn batches_of_copies_are_made_up_to_one_that_cannot_be() {
    passes("static", "batches");
}

#[test]
fn functions_of_old_versions_are_as_natively() {
    passes("static", "old_versions");
}

#[test]
fn streams_by_every_version_of_the_functions() {
    passes("static", "streams");
}

#[test]
fn sets_and_copies_by_every_version_of_the_functions() {
    passes("static", "sets_and_copies");
}

#[test]
fn graphs_by_every_version_of_the_functions() {
    passes("static", "graph_versions");
}

#[test]
fn devices_and_contexts_by_every_version_of_the_functions() {
    passes("static", "devices_and_contexts");
}

#[test]
fn damaged_images_end_in_a_code() {
    passes("static", "damaged_images");
}

#[test]
fn the_largest_grid_is_launched_and_a_larger_one_is_refused_at_the_call() {
    passes("static", "grids");
}

#[test]
fn code_from_files_memory_and_fat_binaries() {
    passes("static", "images");
}

#[test]
fn pools_and_shared_memory_by_place() {
    passes("static", "pool_places");
}

#[test]
fn references_of_modules_are_read_and_written() {
    passes("static", "references");
}

#[test]
fn green_contexts_have_their_part_and_their_streams() {
    passes("static", "green_contexts");
}

#[test]
fn pools_allocate_in_the_order_of_streams() {
    passes("static", "pools");
}

#[test]
fn small_allocations_are_apart_and_kernels_that_leave_them_fault() {
    passes("static", "small_allocations");
}

#[test]
fn large_allocations_are_made_again_and_free_when_the_program_asks() {
    passes("static", "kept_allocations");
}

#[test]
fn memory_is_mapped_at_reserved_addresses() {
    passes("static", "virtual_memory");
}

#[test]
fn processes_share_memory_and_events_by_handles() {
    passes("static", "ipc");
    passes("shared", "ipc");
}

#[test]
fn processes_share_memory_and_pools_by_descriptors() {
    passes("static", "shareable");
}

#[test]
fn nvml_tells_of_the_tenants_own_memory_and_processes() {
    passes("shared", "nvml");
    passes_on("cpu:2", "shared", "nvml");
}

#[test]
fn regions_are_copied_between_all_kinds_of_memory() {
    passes("static", "copies_3d");
}

#[test]
fn several_devices_reach_each_other() {
    passes_on("cpu:2", "static", "peers");
    passes_on("cpu:3", "shared", "peers");
    // The last device is invisible, and the first two are exchanged.
    passes_with("cpu:3", Some("1,0"), "static", "peers");
}

/// A program written for one device runs on one of several.
#[test]
fn programs_for_one_device_run_on_one_of_several() {
    for name in ["vector_add", "pools", "virtual_memory", "contexts"] {
        passes_on("cpu:2", "static", name);
    }
}

/// Runs a program under the checker of the CPU device and returns the checker's lines.
fn checked(name: &str) -> Vec<String> {
    let _alone = alone();
    let path = program("static", name);
    let command = [
        "run",
        "--placement",
        "process",
        "--device",
        "cpu,check",
        "--",
    ];
    let run = finish(wormhole(&command).arg(path));
    assert!(
        run.status.success(),
        "{name}: {}\n{}",
        run.stdout,
        run.stderr
    );
    assert!(
        run.stdout.contains(&format!("PASS {name}")),
        "{}",
        run.stdout
    );
    let lines = run.stderr.lines();
    let said = lines.filter_map(|line| line.strip_prefix("wormhole: checker: "));
    said.map(str::to_owned).collect()
}

#[test]
fn the_checker_tells_a_program_of_its_races() {
    let said = checked("race");
    let has = |kernel: &str, word: &str| {
        let mut lines = said.iter().filter(|line| line.contains(kernel));
        lines.any(|line| line.starts_with(word))
    };
    assert!(
        has("reverse", "race: ") && has("sum", "uninitialised: "),
        "{said:#?}"
    );
    assert!(!has("sum", "race: "), "{said:#?}");
}

macro_rules! programs_are_clean {
    ($($name:ident)*) => {
        #[test]
        fn the_checker_finds_nothing_in_the_demo() {
            $(assert_eq!(checked(stringify!($name)), Vec::<String>::new(), stringify!($name));)*
        }
    };
}

demo_programs!(programs_are_clean);

/// Opens the driver as Python's bindings for CUDA do, with a toolkit's folder in the user's LD_LIBRARY_PATH.
#[test]
fn the_driver_is_opened_by_either_of_its_names() {
    let _alone = alone();
    let others = tempfile::tempdir().expect("a folder");
    std::fs::write(others.path().join("libcuda.so"), "no library").expect("a file");
    for name in ["libcuda.so", "libcuda.so.1"] {
        let code = format!("import ctypes; print('says', ctypes.CDLL({name:?}).cuInit(0))");
        let run = finish(
            wormhole(&["run", "--placement", "process", "--"])
                .args(["python3", "-c", &code])
                .env("LD_LIBRARY_PATH", others.path()),
        );
        assert_eq!(run.stdout, "says 0\n", "{name}: {}", run.stderr);
    }
}

#[test]
fn bursts_of_launches() {
    passes("static", "steady");
}

#[test]
fn functions_of_the_program_that_streams_call() {
    passes("static", "host_functions");
    passes("shared", "host_functions");
}

#[test]
fn captures_allow_and_end_as_natively() {
    passes("static", "captures");
    passes("shared", "captures");
}

#[test]
fn nodes_of_graphs_are_set_read_and_executed_as_natively() {
    passes("static", "graph_nodes");
    passes("shared", "graph_nodes");
}

#[test]
fn conditional_nodes_run_the_bodies_that_kernels_choose() {
    passes("static", "conditional_nodes");
    passes("shared", "conditional_nodes");
}

#[test]
fn streams_that_wait_for_words_and_write_them() {
    passes("static", "memory_operations");
}

#[test]
fn the_exit_status_is_the_programs() {
    let _alone = alone();
    let run = finish(&mut wormhole(&[
        "run",
        "--placement",
        "process",
        "--",
        "/bin/sh",
        "-c",
        "exit 41",
    ]));
    assert_eq!(run.status.code(), Some(41), "{}", run.stderr);
}

#[test]
fn a_program_ended_by_a_signal_reports_it_as_a_shell_does() {
    let _alone = alone();
    let run = finish(&mut wormhole(&[
        "run",
        "--placement",
        "process",
        "--",
        "/bin/sh",
        "-c",
        "kill -TERM $$",
    ]));
    assert_eq!(
        run.status.code(),
        Some(128 + libc::SIGTERM),
        "{}",
        run.stderr
    );
}

/// Programs that are also built with a wrong kernel.
pub const BROKEN: [&str; 3] = ["vector_add", "prefix_scan", "black_scholes"];

#[test]
fn a_broken_kernel_is_noticed() {
    let _alone = alone();
    for name in BROKEN {
        let run =
            finish(wormhole(&["run", "--placement", "process", "--"]).arg(program("broken", name)));
        assert_eq!(run.status.code(), Some(1), "{}\n{}", run.stdout, run.stderr);
        let words = format!("FAIL {name}: index ");
        assert!(run.stdout.starts_with(&words), "{}", run.stdout);
    }
}

#[test]
fn a_killed_neighbours_memory_is_free_again() {
    let _alone = alone();
    let run = finish(
        wormhole(&["run", "--placement", "process", "--window", "192M", "--"])
            .arg(program("static", "neighbour")),
    );
    assert!(run.status.success(), "{}\n{}", run.stdout, run.stderr);
    assert!(run.stdout.contains("PASS neighbour"), "{}", run.stdout);
}

/// Covers forks before and after the first call, execve, threads, two runtimes, and every order of ends. Each case
/// behaves as natively.
#[test]
fn processes_fork_and_end_in_every_order() {
    passes("static", "lives");
}

#[test]
fn a_tenant_has_a_limit_of_sessions() {
    let _alone = alone();
    let run = finish(
        wormhole(&["run", "--placement", "process", "--window", "2G", "--"])
            .arg(program("static", "many"))
            .arg("66"),
    );
    assert!(run.status.success(), "{}\n{}", run.stdout, run.stderr);
    assert_eq!(
        run.stdout,
        "64 of 66 have a context and copy, 2 were refused with cudaErrorSystemNotReady\n"
    );
    assert!(
        run.stderr
            .contains("the tenant has 64 sessions, its limit is 64"),
        "{}",
        run.stderr
    );
}

#[test]
fn the_least_usual_window_has_room_for_as_many_sessions_as_a_tenant_may_have() {
    let _alone = alone();
    let run = finish(
        wormhole(&["run", "--placement", "process", "--window", "258M", "--"])
            .arg(program("static", "many"))
            .arg("64"),
    );
    assert!(run.status.success(), "{}\n{}", run.stdout, run.stderr);
    assert_eq!(
        run.stdout, "64 of 64 have a context and copy, 0 were refused with cudaSuccess\n",
        "{}",
        run.stderr
    );
    // Copies get fewer staging buffers than they ask for, which is no failure and is not logged.
    assert!(!run.stderr.contains("has no room"), "{}", run.stderr);
}

/// Runs a program that fills the window with page-locked memory. A line names the window and how to enlarge it.
#[test]
fn memory_is_copied_when_page_locked_memory_has_filled_the_window() {
    let _alone = alone();
    for link in ["static", "shared"] {
        let mut run = wormhole(&["run", "--placement", "process", "--window", "258M", "--"]);
        let run = finish(run.arg(program(link, "full_window")));
        for words in ["of them: cudaErrorMemoryAllocation", "PASS full_window"] {
            assert!(run.stdout.contains(words), "{}\n{}", run.stdout, run.stderr);
        }
        let line = "258 MiB of it can be used, and wormhole run --window allows more";
        assert_eq!(run.stderr.matches(line).count(), 1, "{}", run.stderr);
    }
}

/// A program that needs more page-locked memory than the least window has runs without `--window`.
#[test]
fn the_default_window_has_room_for_half_a_gigabyte_of_page_locked_memory() {
    let run = passes("static", "full_window");
    let words = "256 times, and after the last of them: cudaSuccess";
    assert!(run.stdout.contains(words), "{}", run.stdout);
    assert!(!run.stderr.contains("has no room"), "{}", run.stderr);
}

#[test]
fn two_processes_with_the_same_process_id_are_distinguished() {
    let _alone = alone();
    let run = finish(
        wormhole(&["run", "--placement", "process", "--window", "192M", "--"])
            .arg(program("static", "neighbour"))
            .arg("pidns"),
    );
    assert!(run.status.success(), "{}\n{}", run.stdout, run.stderr);
    assert!(run.stdout.contains("PASS neighbour"), "{}", run.stdout);
}

#[test]
fn eight_waiting_threads_are_released_soon_after_a_fault_is_detected() {
    let _alone = alone();
    are_released_after_detection("cpu");
}

/// Programs with faults, asserts and printf, and lines of their output on a GPU.
pub const FAULTS: [(&str, &[&str]); 5] = [
    (
        "trap",
        &[
            "cudaStreamSynchronize(legacy): cudaErrorLaunchFailure",
            "PASS trap cudaErrorLaunchFailure",
        ],
    ),
    (
        "illegal_address",
        &[
            "cudaDeviceSynchronize(): cudaErrorIllegalAddress",
            "PASS illegal_address",
        ],
    ),
    (
        "assert",
        &[
            "cudaDeviceSynchronize(): cudaErrorAssert",
            "PASS assert cudaErrorAssert",
        ],
    ),
    (
        "printf",
        &[
            "device: -7 3000000000 -5000000000 beef  3.14 w %",
            "thread 41 of block 0",
            "PASS printf",
        ],
    ),
    (
        "sticky",
        &[
            "silent: cuStreamDestroy, cuCtxSynchronize: 700, then 700 and 700",
            "printf: a kernel, cudaDeviceSynchronize: 700, then 700 and 700",
            "PASS sticky: ",
        ],
    ),
];

#[test]
fn faults_report_as_a_gpu_does() {
    let _alone = alone();
    for (name, lines) in FAULTS {
        let run =
            finish(wormhole(&["run", "--placement", "process", "--"]).arg(program("static", name)));
        assert!(
            run.status.success(),
            "{name}: {}\n{}",
            run.stdout,
            run.stderr
        );
        for line in lines {
            assert!(
                run.stdout.contains(line),
                "{name} did not say {line:?} but: {}",
                run.stdout
            );
        }
    }
}

#[test]
fn what_threads_hand_to_each_other_stays_in_order() {
    let _alone = alone();
    let run = finish(
        wormhole(&["run", "--placement", "process", "--"])
            .arg(program("shared", "handoff"))
            .arg("4000"),
    );
    assert!(run.status.success(), "{}\n{}", run.stdout, run.stderr);
    assert!(run.stdout.contains("inversions 0"), "{}", run.stdout);
}
