//! Memory that stays charged to a cgroup after its last process has ended.
//!
//! The kernel charges a page to the cgroup that touched it first, until the page is free. Another process may keep it: a
//! launcher that holds its window open, or a guest that holds its session's file. A cgroup without a process that is
//! removed takes such a charge out of its limit, and its owner could begin anew with a whole one.
//!
//! Pages of files on a disk are charged as well, and stay in the page cache when nobody uses them. The kernel
//! frees them when memory is short, so they do not count here, nor does what the kernel itself keeps for a cgroup.

use std::fs;
use std::path::Path;
use std::time::Duration;

/// Time after which `memory.stat` includes all that came before (Linux, `FLUSH_TIME`: 2 s).
pub const SETTLED: Duration = Duration::from_millis(2500);
/// Bytes that each processor may hold in advance for a cgroup: 64 pages (Linux, `MEMCG_CHARGE_BATCH`).
const IN_ADVANCE: u64 = 64 * 4096;
/// Kinds of the kernel's own memory in `memory.stat`, for kernels before 5.18, which do not state the sum.
const KERNEL: [&str; 5] = ["slab", "percpu", "kernel_stack", "pagetables", "vmalloc"];

/// Returns whether a cgroup without processes, or one below it that was removed, still has pages that are not free. Soon
/// after its last process has ended (not `is_settled`) it may return true although they are free.
pub fn has_pages(cgroup: &Path, is_settled: bool) -> bool {
    let read = |file| fs::read_to_string(cgroup.join(file)).unwrap_or_default();
    // A removed cgroup is there until nothing is charged to it. This count is exact at any time.
    let is_empty = number(&read("cgroup.stat"), "nr_dying_descendants") == Some(0);
    let current = read("memory.current").trim().parse().unwrap_or(0);
    let processors = std::thread::available_parallelism().map_or(1, |count| count.get() as u64);
    let slack = IN_ADVANCE * (processors + 1);
    (!is_empty && !is_settled) || holds(&read("memory.stat"), current, slack)
}

fn number(stat: &str, name: &str) -> Option<u64> {
    let mut lines = stat.lines().filter_map(|line| line.split_once(' '));
    let (_, value) = lines.find(|(of, _)| *of == name)?;
    value.trim().parse().ok()
}

fn holds(stat: &str, current: u64, slack: u64) -> bool {
    let sum = |names: &[&str]| {
        let numbers = names.iter().filter_map(|name| number(stat, name));
        numbers.sum::<u64>()
    };
    if sum(&["anon", "shmem"]) > 0 {
        return true;
    }
    // Pages of a file that is gone, which something has pinned, are in no line but in the sum.
    let freed_when_short = sum(&["active_file", "inactive_file"]);
    let kernel = number(stat, "kernel").unwrap_or_else(|| sum(&KERNEL));
    current.saturating_sub(freed_when_short + kernel) > slack
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_page_that_is_kept_counts_and_what_the_kernel_frees_does_not() {
        let cached = "anon 0\nfile 8192\nkernel 4096\nshmem 0\ninactive_file 8192\nactive_file 0\n";
        assert!(!holds(cached, 12_288, 0));
        assert!(holds("anon 0\nshmem 4096\ninactive_file 0\n", 4096, 8192));
        assert!(holds("anon 4096\nshmem 0\n", 4096, 8192));
        assert!(!holds("", 0, 0));
    }

    #[test]
    fn pinned_pages_of_a_file_that_is_gone_count() {
        let stat = "anon 0\nshmem 0\ninactive_file 4096\nslab 4096\npercpu 4096\n";
        assert!(!holds(stat, 12_288 + 8192, 8192));
        assert!(holds(stat, 12_288 + 8193, 8192));
    }
}
