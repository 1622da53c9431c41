//! Decodes a machine's report and its run file: both cross the machine's boundary.

use wormhole_init::{COLLECT_BYTES, MAX_FILES, Report, RunFile};

pub fn run(input: &[u8]) {
    match Report::read(input, MAX_FILES, COLLECT_BYTES) {
        Err(error) => _ = error.to_string(),
        Ok(report) => {
            let mut again = Vec::new();
            report.write(&mut again).expect("memory");
            assert_eq!(
                Report::read(&again[..], MAX_FILES, COLLECT_BYTES).expect("our own bytes"),
                report
            );
        }
    }
    if let Err(error) = RunFile::parse(input) {
        _ = error.to_string();
    }
}
