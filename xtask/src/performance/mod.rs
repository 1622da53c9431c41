//! `cargo xtask performance`: writes the parts of docs/performance.md that have figures, and their plots, from the files
//! in `benches/results`.
//!
//! A part is between the lines `<!-- figures NAME -->` and `<!-- end of figures -->`; `NAME.json` has its figures.

mod plot;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use wormhole_figures::{Failed, Report};

use crate::command::{Failure, step};
use crate::programs::files;

/// Folder of the figures, one file for each run of a benchmark.
const RESULTS: &str = "benches/results";
const PAGE: &str = "docs/performance.md";
/// Folder of the plots, as the page names it.
const PLOTS: &str = "plots";

const BEGIN: (&str, &str) = ("<!-- figures ", " -->");
const END: &str = "<!-- end of figures -->";

/// Writes the page and the plots.
pub fn performance(root: &Path) -> Result<(), Failure> {
    for (path, text) in made(root)? {
        step(&format!("writing {}", path.display()));
        let folder = path.parent().unwrap_or(root);
        fs::create_dir_all(folder)
            .and_then(|()| fs::write(&path, text))
            .map_err(|error| Failure::new(format!("cannot write {}: {error}", path.display())))?;
    }
    Ok(())
}

/// Returns the page and the plots, with their texts.
fn made(root: &Path) -> Result<BTreeMap<PathBuf, String>, Failure> {
    let mut reports = BTreeMap::new();
    for file in files(&root.join(RESULTS), "json")? {
        let report = Report::read(&file).map_err(|error| Failure::new(error.to_string()))?;
        let name = file.file_stem().unwrap_or_default().to_string_lossy();
        reports.insert(name.into_owned(), report);
    }
    let path = root.join(PAGE);
    let page = fs::read_to_string(&path)
        .map_err(|error| Failure::new(format!("cannot read {}: {error}", path.display())))?;
    let mut made = BTreeMap::from([(path.clone(), filled(&page, &reports)?)]);
    for (name, report) in &reports {
        if let Some(plot) = plot::plot(report) {
            let file = Path::new(PLOTS).join(name).with_extension("svg");
            made.insert(path.with_file_name(file), plot);
        }
    }
    Ok(made)
}

/// Returns the page with the figures of each part. Each report needs a part, and each part a report.
fn filled(page: &str, reports: &BTreeMap<String, Report>) -> Result<String, Failure> {
    let mut text = String::new();
    let mut missing: Vec<&String> = reports.keys().collect();
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        text.push_str(line);
        text.push('\n');
        let name = line.strip_prefix(BEGIN.0);
        let Some(name) = name.and_then(|name| name.strip_suffix(BEGIN.1)) else {
            continue;
        };
        let Some(report) = reports.get(name) else {
            return Err(Failure::new(format!(
                "{PAGE} has a part for `{name}`: there is no {RESULTS}/{name}.json"
            )));
        };
        missing.retain(|other| *other != name);
        if !lines.any(|line| line == END) {
            return Err(Failure::new(format!(
                "{PAGE}: no line `{END}` follows the begin of the part `{name}`"
            )));
        }
        text.push_str(&part(name, report));
        text.push_str(END);
        text.push('\n');
    }
    match missing[..] {
        [] => Ok(text),
        [name, ..] => Err(Failure::new(format!(
            "{PAGE} has no place for {RESULTS}/{name}.json: write the lines `{}{name}{}` and `{END}` there",
            BEGIN.0, BEGIN.1
        ))),
    }
}

/// Returns the conditions, the plot and the table of a report.
fn part(name: &str, report: &Report) -> String {
    let mut blocks = vec![report.circumstances()];
    if plot::has_ratios(report) {
        let references = report.references.join(" and ");
        blocks.push(format!("![Ratios to {references}]({PLOTS}/{name}.svg)"));
    }
    blocks.push(report.table());
    let failed = |failed: &Failed| format!("`{}` failed by {}.", failed.work, failed.way);
    blocks.extend(report.failures.iter().map(failed));
    format!("\n{}\n\n", blocks.join("\n\n"))
}

#[cfg(test)]
mod tests {
    use wormhole_figures::Unit;

    use super::*;

    fn report() -> Report {
        let mut report = Report::new("calls", &["poll", "socket", "native"], &["native"], 1);
        let samples = vec![vec![10.0], vec![4000.0], vec![100.0]];
        report.add_once("cuLaunchKernel", "<again>", Unit::Nanoseconds, samples);
        report
    }

    #[test]
    fn the_page_and_the_plots_are_made_of_the_committed_figures() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let made = made(&root).expect("the figures fit the page");
        for (path, text) in &made {
            let committed = fs::read_to_string(path).unwrap_or_default();
            let path = path.display();
            assert!(
                committed == *text,
                "{path} is outdated: run `cargo xtask performance`"
            );
        }
        let plots = fs::read_dir(root.join("docs").join(PLOTS))
            .into_iter()
            .flatten();
        for plot in plots.flatten() {
            let path = root.join("docs").join(PLOTS).join(plot.file_name());
            assert!(
                made.contains_key(&path),
                "{} is of no figures",
                path.display()
            );
        }
    }

    #[test]
    fn each_report_has_a_part_and_each_part_a_report() {
        let reports = BTreeMap::from([("x".to_owned(), report())]);
        let page = "before\n<!-- figures x -->\nold\n<!-- end of figures -->\nbehind\n";
        let text = filled(page, &reports).expect("it fits");
        assert!(text.starts_with("before\n<!-- figures x -->\n\n"), "{text}");
        assert!(
            text.ends_with("|\n\n<!-- end of figures -->\nbehind\n"),
            "{text}"
        );
        assert!(
            text.contains("| cuLaunchKernel (<again>) | 10.0 ns |"),
            "{text}"
        );
        assert_eq!(filled(&text, &reports).expect("it fits"), text);
        for page in [
            "no part\n",
            "<!-- figures x -->\n",
            "<!-- figures y -->\n<!-- end of figures -->\n",
        ] {
            assert!(filled(page, &reports).is_err(), "{page}");
        }
    }

    #[test]
    fn a_plot_has_a_bar_for_each_ratio_and_reads_in_light_and_dark() {
        let plot = plot::plot(&report()).expect("a plot");
        // A bar and a mark of the legend for each way that is no reference.
        for colour in &plot::COLOURS[..2] {
            let fill = format!("fill=\"#{:02X}{:02X}{:02X}\"", colour.0, colour.1, colour.2);
            let bars = plot.matches(&fill).count();
            assert_eq!(bars, 2, "{plot}");
        }
        assert!(plot.contains("cuLaunchKernel (&lt;again&gt;)"), "{plot}");
        assert!(plot.contains("prefers-color-scheme: dark"), "{plot}");
        let without = Report::new("calls", &["poll"], &[], 1);
        assert!(plot::plot(&without).is_none());
    }
}
