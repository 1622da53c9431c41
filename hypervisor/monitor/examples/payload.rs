//! Runs a payload.
//!
//! ```text
//! payload pingpong ELF ROUNDS    bare round trip through the window, with its exits
//! payload spin ELF TURNS         the control run: private memory only
//! payload fault ELF NUMBER       shows how an exception is reported
//! ```

use std::error::Error;
use std::fs::File;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use vm_memory::{FileOffset, MmapRegion, VolatileMemory};
use wormhole_monitor::payload::{PayloadConfig, PayloadReport, PayloadVm, PayloadWindow};
use wormhole_monitor::{DisabledExits, sealed_file};

const WINDOW: u64 = 0x5000_0000_0000;
const WINDOW_BYTES: usize = 16 << 20;
const PONG: u64 = 128;
const RECORD: u64 = 4096;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            let mut cause = error.source();
            while let Some(error) = cause {
                eprintln!("  because: {error}");
                cause = error.source();
            }
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [kind, elf, number] = args.as_slice() else {
        return Err("usage: payload pingpong|spin|fault ELF NUMBER".into());
    };
    let number: u64 = number.parse()?;
    let config = |parameters| -> Result<PayloadConfig, std::io::Error> {
        Ok(PayloadConfig {
            elf: std::fs::read(elf)?,
            parameters: vec![parameters],
            memory_mib: 16,
            window: None,
            timeout: Some(Duration::from_secs(120)),
            disabled_exits: DisabledExits::default(),
            pins: Vec::new(),
        })
    };
    match kind.as_str() {
        "pingpong" => pingpong(
            config(vec![WINDOW, WINDOW + PONG, number, WINDOW + RECORD])?,
            number,
        ),
        _ => {
            let vm = PayloadVm::new(config(vec![number])?)?;
            let block = vm.parameters(0).ok_or("no vCPU")?;
            let stats = vm.stats();
            let before = stats.read()?;
            let report = vm.run()?;
            print(&report, stats.read()?.since(&before).vcpu_sum("exits"));
            println!("{:?} turns", block.load(2));
            Ok(())
        }
    }
}

fn print(report: &PayloadReport, kvm_exits: u64) {
    println!(
        "{} after {:?}; exits to the monitor {:?}; KVM counts {kvm_exits} exits",
        report.outcome, report.duration, report.exits
    );
}

fn pingpong(config: PayloadConfig, rounds: u64) -> Result<(), Box<dyn Error>> {
    if rounds * 8 + RECORD > WINDOW_BYTES as u64 {
        return Err("too many rounds for the window".into());
    }
    let memfd = sealed_file("window", WINDOW_BYTES as u64)?;
    let view = MmapRegion::<()>::from_file(
        FileOffset::new(File::from(memfd.try_clone()?), 0),
        WINDOW_BYTES,
    )?;
    let vm = PayloadVm::new(PayloadConfig {
        window: Some(PayloadWindow {
            memfd,
            address: WINDOW,
        }),
        ..config
    })?;
    let stats = vm.stats();
    let before = stats.read()?;
    let running = std::thread::spawn(move || vm.run());
    let slice = view.as_volatile_slice();
    let word =
        |offset: u64| slice.get_atomic_ref::<AtomicU64>(usize::try_from(offset).unwrap_or(0));
    let (ping, pong) = (word(0)?, word(PONG)?);
    for round in 1..=rounds {
        let mut turns = 0u64;
        // SYNC POINT: ping, with the payload's store.
        while ping.load(Ordering::Acquire) != round {
            std::hint::spin_loop();
            turns += 1;
            if turns.is_multiple_of(1 << 20) && running.is_finished() {
                break;
            }
        }
        // SYNC POINT: pong, with the payload's load.
        pong.store(round, Ordering::Release);
    }
    let report = running.join().map_err(|_| "the VM's thread panicked")??;
    print(&report, stats.read()?.since(&before).vcpu_sum("exits"));
    let mut stamps = (0..rounds)
        .map(|round| Ok(word(RECORD + 8 * round)?.load(Ordering::Relaxed)))
        .collect::<Result<Vec<u64>, vm_memory::VolatileMemoryError>>()?;
    stamps.sort_unstable();
    let at = |percent: usize| {
        stamps
            .get(stamps.len() * percent / 100)
            .copied()
            .unwrap_or(0)
    };
    println!(
        "round trip in time stamps: median {}, 90 % {}, 99 % {}",
        at(50),
        at(90),
        at(99)
    );
    Ok(())
}
