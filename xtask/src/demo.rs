//! `cargo xtask demo`: the main job. CUDA programs in a real guest VM, verified.

use std::path::{Path, PathBuf};
use std::time::Instant;

use serde::Deserialize;

use crate::command::{Failure, Run, step};
use crate::{programs, setup, stage, toolchain};

/// What `wormhole run --json` says of a run, as far as the demo reports it.
#[derive(Debug, Deserialize)]
struct Summary {
    guest: String,
    records: u64,
    requests: u64,
    exits_per_call: Option<f64>,
}

/// Sets up, builds, boots a guest and runs the programs in it: these, or the standard set.
pub fn demo(root: &Path, chosen: &[PathBuf]) -> Result<bool, Failure> {
    let start = Instant::now();
    setup::for_demo(root)?;
    let stage = stage::stage(root)?;
    let programs: Vec<PathBuf> = if chosen.is_empty() {
        programs::build(&toolchain::ensure(root)?, root)?
            .into_iter()
            .filter(|program| program.demo)
            .map(|program| program.path)
            .collect()
    } else {
        chosen.to_vec()
    };
    step(&format!(
        "set up in {} s; booting a guest for {} programs",
        start.elapsed().as_secs(),
        programs.len()
    ));

    let json = root.join("target/demo.json");
    let mut run = Run::new(stage.wormhole())
        .args(["run", "--placement", "host", "--device", "cpu", "--json"])
        .args([&json])
        .env("WORMHOLE_IMAGES", setup::images(root));
    for program in &programs {
        run = run.args([Path::new("--take"), program]);
    }
    let (success, output) = run
        .args(["--", "/bin/sh", "-c", &script(&programs)])
        .tee()?;

    let passed = output
        .lines()
        .filter(|line| line.starts_with("PASS "))
        .count();
    if !success || passed != programs.len() {
        println!(
            "demo: FAIL {passed} of {} programs passed; {}",
            programs.len(),
            if success {
                "the run itself ended well"
            } else {
                "the run ended with an error"
            }
        );
        return Ok(false);
    }
    let text = std::fs::read_to_string(&json)
        .map_err(|error| Failure::new(format!("cannot read {}: {error}", json.display())))?;
    let summary: Summary = serde_json::from_str(&text)
        .map_err(|error| Failure::new(format!("{} is not a summary: {error}", json.display())))?;
    if summary.requests == 0 || summary.records == 0 {
        println!("demo: FAIL the programs passed, but the worker executed nothing for them");
        return Ok(false);
    }
    let exits = summary
        .exits_per_call
        .map_or_else(|| "unknown".to_owned(), |exits| format!("{exits:.3}"));
    println!(
        "demo: PASS programs={passed} guest={} requests={} records={} exits_per_call={exits}",
        summary.guest, summary.requests, summary.records
    );
    eprintln!("xtask: all of it took {} s", start.elapsed().as_secs());
    Ok(true)
}

/// Runs every program; the status tells whether all of them succeeded.
fn script(programs: &[PathBuf]) -> String {
    let mut text = String::from("failed=0\n");
    for program in programs {
        text.push_str(&format!("'{}' || failed=1\n", program.display()));
    }
    text.push_str("exit $failed\n");
    text
}
