//! Compares the CPU device with the recorded answers of a GPU.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use wormhole_cpu_device::{CpuDevice, Options};
use wormhole_ptx_conformance::answers::{Answer, parse};
use wormhole_ptx_conformance::compare::{Outcome, compare};
use wormhole_ptx_conformance::form::Group;
use wormhole_ptx_conformance::latitude::{LATITUDE, row};
use wormhole_ptx_conformance::run::{Failure, Runner};
use wormhole_ptx_conformance::table::groups;

/// Maximum number of differing rows printed for a form.
const SHOWN: usize = 4;

#[derive(Default)]
struct Counts {
    forms: usize,
    rows: usize,
    exact: usize,
    within: usize,
    /// Number of rows explained by [`LATITUDE`].
    explained: usize,
    differing: usize,
    refused: usize,
    unanswered: usize,
}

impl Counts {
    fn add(&mut self, other: &Self) {
        self.forms += other.forms;
        self.rows += other.rows;
        self.exact += other.exact;
        self.within += other.within;
        self.explained += other.explained;
        self.differing += other.differing;
        self.refused += other.refused;
        self.unanswered += other.unanswered;
    }

    fn print(&self, name: &str) {
        println!(
            "{name:<15} {:>6} {:>6} {:>6} {:>6} {:>9} {:>9} {:>7} {:>10}",
            self.forms,
            self.rows,
            self.exact,
            self.within,
            self.explained,
            self.differing,
            self.refused,
            self.unanswered,
        );
    }
}

fn kept(group: &str) -> HashMap<String, Answer> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("answers");
    let path = folder.join(format!("{group}.txt"));
    let text =
        fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    parse(&text)
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()))
        .into_iter()
        .map(|answer| (answer.name.clone(), answer))
        .collect()
}

fn device() -> CpuDevice {
    CpuDevice::open(&Options {
        memory: Some(64 << 20),
        ..Default::default()
    })
    .expect("open")
}

/// Compares one group, and adds a sentence to `failures` for each failure.
fn check(group: &Group, used: &mut [bool], failures: &mut Vec<String>) -> Counts {
    let kept = kept(group.name);
    let mut counts = Counts::default();
    let mut fresh = device();
    let mut forms = group.forms.iter().peekable();
    while forms.peek().is_some() {
        let runner = Runner::new(&fresh).expect("memory");
        // A fault kills the context: the next form runs on a new device.
        let mut dead = false;
        while let Some(form) = forms.next_if(|_| !dead) {
            let results = runner.run(form);
            dead = matches!(results, Err(Failure::Faulted(_)));
            let found = Answer::new(form, results);
            counts.forms += 1;
            counts.rows += form.rows;
            let mut fail = |sentence: &str| {
                failures.push(format!("{}: {}: {sentence}", group.name, form.name));
            };
            match compare(form, kept.get(&form.name), &found) {
                Outcome::Refused => counts.refused += 1,
                Outcome::NoAnswer => {
                    counts.unanswered += 1;
                    fail("no answer is kept for it");
                }
                Outcome::OneSided { kept, found } => {
                    counts.differing += form.rows;
                    fail(&format!("kept {kept}, found {found}"));
                }
                Outcome::Compared {
                    exact,
                    within,
                    differing,
                } => {
                    counts.exact += exact;
                    counts.within += within;
                    let mut unexplained = differing;
                    unexplained.retain(|difference| {
                        let entry = row(group.name, form, difference);
                        if let Some(entry) = entry {
                            used[entry] = true;
                            counts.explained += 1;
                        }
                        entry.is_none()
                    });
                    counts.differing += unexplained.len();
                    for difference in unexplained.iter().take(SHOWN) {
                        fail(&format!(
                            "row {}: {:x?} gives {:x?}, kept is {:x?} ({} rows differ)",
                            difference.row,
                            difference.operands,
                            difference.found,
                            difference.kept,
                            unexplained.len(),
                        ));
                    }
                }
            }
        }
        drop(runner);
        fresh = device();
    }
    counts
}

#[test]
fn the_cpu_device_answers_as_the_gpu_did() {
    let mut failures = Vec::new();
    let mut total = Counts::default();
    let mut used = vec![false; LATITUDE.len()];
    println!("group            forms   rows  exact within explained differing refused unanswered");
    for group in groups() {
        let counts = check(&group, &mut used, &mut failures);
        counts.print(group.name);
        total.add(&counts);
    }
    total.print("all");
    for (known, used) in LATITUDE.iter().zip(used) {
        if !used {
            failures.push(format!(
                "{}: {}: nothing differs any more for this reason: {}",
                known.group, known.forms, known.reason
            ));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
