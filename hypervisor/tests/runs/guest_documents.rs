//! Runs programs in guests by the commands of README and of the pages in `docs` unchanged.

use std::fs;

use crate::documents::{commands_for, parse, users_folder};
use crate::harness::{beside_other_guests, finish_at};

#[test]
fn programs_run_in_guests_by_the_commands_of_the_pages() {
    let _beside = beside_other_guests();
    let folder = users_folder();
    let mut executed = 0;
    for line in commands_for("programs_run_in_guests_by_the_commands_of_the_pages") {
        let run = finish_at(&mut parse(&line, folder.path()), true);
        assert!(run.status.success(), "{line}: {}", run.stderr);
        assert!(run.stdout.contains("PASS"), "{line}: {}", run.stdout);
        executed += 1;
    }
    assert!(executed >= 6, "only {executed} commands were found");
    let summary = fs::read_to_string(folder.path().join("summary.json"));
    let summary = summary.expect("a page has a command with --json");
    assert!(summary.contains("\"requests\""), "{summary}");
    let loss = fs::read_to_string(folder.path().join("loss.csv"));
    assert_eq!(
        loss.expect("a page has a command with --collect"),
        "1,0.5\n"
    );
}
