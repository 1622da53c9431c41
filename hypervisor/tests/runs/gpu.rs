//! Runs the same programs on the native driver and through Wormhole, on a machine with an NVIDIA GPU.

use std::process::{Command, Stdio};
use std::time::Duration;

use crate::backends::{Runtime, sees_nothing_of_its_neighbour};
use crate::delegated::Delegated;
use crate::harness::{
    Finished, Underway, alone, demo_programs, eventually, finish, program, wormhole,
};
use crate::waiters::are_released_after_detection;

fn native(link: &str, name: &str) -> Finished {
    finish(Command::new(program(link, name)).stdin(Stdio::null()))
}

fn forwarded(link: &str, name: &str) -> Finished {
    finish(
        wormhole(&["run", "--placement", "process", "--device", "cuda:0", "--"])
            .arg(program(link, name)),
    )
}

/// Returns the program's own lines on standard error.
fn own_stderr(run: &Finished) -> String {
    run.stderr
        .lines()
        .filter(|line| !line.starts_with("wormhole: "))
        .map(|line| format!("{line}\n"))
        .collect()
}

/// Asserts that output, error text and exit status equal those on the native driver.
fn equals_native(link: &str, name: &str) {
    let _alone = alone();
    let (expected, got) = (native(link, name), forwarded(link, name));
    assert_eq!(
        got.stdout, expected.stdout,
        "{name}: standard output; on standard error: {}",
        got.stderr
    );
    assert_eq!(
        own_stderr(&got),
        own_stderr(&expected),
        "{name}: standard error"
    );
    assert_eq!(
        got.status.code(),
        expected.status.code(),
        "{name}: exit status"
    );
}

macro_rules! equal_native {
    ($($test:ident: $link:literal $name:literal;)*) => {$(
        #[test]
        #[ignore = "needs an NVIDIA GPU"]
        fn $test() {
            equals_native($link, $name);
        }
    )*};
}

macro_rules! programs_equal_native {
    ($($name:ident)*) => {$(
        mod $name {
            #[test]
            #[ignore = "needs an NVIDIA GPU"]
            fn with_the_static_runtime() {
                super::equals_native("static", stringify!($name));
            }

            #[test]
            #[ignore = "needs an NVIDIA GPU"]
            fn with_the_shared_runtime() {
                super::equals_native("shared", stringify!($name));
            }
        }
    )*};
}

demo_programs!(programs_equal_native);

equal_native! {
    an_illegal_address: "static" "illegal_address";
    a_trap: "static" "trap";
    an_assert: "static" "assert";
    device_printf: "static" "printf";
    an_error_that_stays: "static" "sticky";
}

/// The driver believes the bodies of cubins, and natively ends the program. Here it can end the program's own worker, and
/// another program of the same backend does not notice.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn damaged_images_end_their_own_session_at_most() {
    let _alone = alone();
    let runtime = Runtime::new();
    runtime.start("images", &["--device", "cuda:0"]);
    let steady = std::thread::scope(|scope| {
        let beside = scope.spawn(|| finish(runtime.run("images").arg(program("static", "pools"))));
        let run = finish(
            runtime
                .run("images")
                .arg(program("static", "damaged_images")),
        );
        let is_lost = run.stderr.contains("CUDA_ERROR_CONTEXT_IS_DESTROYED (709)");
        let passes = run.status.success() && run.stdout.contains("PASS damaged_images");
        assert!(passes || is_lost, "{}\n{}", run.stdout, run.stderr);
        beside.join().expect("a thread")
    });
    assert!(
        steady.status.success(),
        "{}\n{}",
        steady.stdout,
        steady.stderr
    );
    runtime.passes("images", "vector_add");
}

/// The driver's handle of memory can be guessed, so tenants who do not trust each other have none.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn programs_of_strangers_share_no_memory_by_handles() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root serves strangers on a GPU");
        return;
    }
    let _alone = alone();
    let cgroup = match Delegated::new() {
        Ok(cgroup) => cgroup,
        Err(reason) => return println!("skipped: {reason}"),
    };
    let runtime = Runtime::new();
    let start = runtime.command(&["backend", "start", "strangers", "--device", "cuda:0"]);
    let started = finish(&mut cgroup.entered_by(&start));
    assert!(started.status.success(), "{}", started.stderr);
    let run = finish(runtime.run("strangers").arg(program("static", "ipc")));
    assert!(!run.status.success(), "{}", run.stdout);
    let refused = "cudaIpcGetMemHandle(&handles.large, large): cudaErrorNotSupported";
    assert!(
        run.stdout.contains(refused),
        "{}\n{}",
        run.stdout,
        run.stderr
    );
    runtime.passes("strangers", "shareable");
}

/// Before its neighbour comes, the program sees figures of the whole device. So the machine has the figures that are missing
/// beside the neighbour.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_tenant_sees_nothing_of_its_neighbour_on_a_gpu() {
    /// Least memory that a context takes.
    const CONTEXT: u64 = 200 << 20;
    let _alone = alone();
    let [before, after] = sees_nothing_of_its_neighbour("cuda:0");
    for seen in [&before, &after] {
        let not_free: u64 = seen["not_free"].parse().expect("a number");
        assert!(not_free > CONTEXT, "{seen:?}");
        assert_eq!(seen["set"], "cudaSuccess", "{seen:?}");
        assert_ne!(seen["persisting"], "0", "{seen:?}");
    }
    for name in ["power", "energy", "utilization"] {
        assert_eq!(before[name], "0", "{before:?}");
        // The neighbour's work may still show.
        assert_eq!(after[name], "3", "{after:?}");
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn eight_waiting_threads_are_released_soon_after_a_fault_is_detected() {
    let _alone = alone();
    are_released_after_detection("cuda:0");
}

/// All processes share the GPU's memory, so the test sees that a killed process's memory is freed.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_killed_process_gives_its_device_memory_back() {
    let _alone = alone();
    for mode in ["", "pidns"] {
        let run = finish(
            wormhole(&[
                "run",
                "--placement",
                "process",
                "--device",
                "cuda:0",
                "--window",
                "192M",
                "--",
            ])
            .arg(program("static", "neighbour"))
            .arg(mode),
        );
        assert!(run.status.success(), "{}\n{}", run.stdout, run.stderr);
        assert!(
            run.stdout.contains("device memory free after"),
            "{}",
            run.stdout
        );
        assert!(run.stdout.contains("PASS neighbour"), "{}", run.stdout);
    }
}

/// Kills each party in the middle of a run. Used device memory then returns to its earlier value.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn kills_leave_no_device_memory_behind() {
    let _alone = alone();
    let before = used_memory();
    for party in ["spin", "wormhole-worker", "wormhole-supervisor", "wormhole"] {
        let run = Underway::start(
            wormhole(&["run", "--placement", "process", "--device", "cuda:0", "--"])
                .arg(program("static", "spin")),
        );
        run.working();
        run.kill_9(party);
        run.finish();
        eventually("the device's memory", Duration::from_secs(20), || {
            used_memory() <= before
        });
    }
}

/// Returns the MiB of device memory in use, as nvidia-smi counts them.
fn used_memory() -> u64 {
    let run = finish(
        Command::new("nvidia-smi")
            .args(["--query-gpu=memory.used", "--format=csv,noheader,nounits"]),
    );
    run.stdout
        .trim()
        .parse()
        .unwrap_or_else(|_| panic!("nvidia-smi said {} {}", run.stdout, run.stderr))
}
