//! `cargo xtask nccl`: runs unmodified NCCL between two processes on the CPU device, over each of its transports.

use std::path::Path;

use crate::command::{Failure, Run, step};
use crate::nvcc::{self, Build, Link};
use crate::pytest::{install, package};
use crate::{stage, toolchain};

/// Window size with room for NCCL's module of 240 MB.
const WINDOW: &str = "4G";

/// A transport of NCCL between two ranks.
#[derive(Debug)]
struct Way {
    name: &'static str,
    device: &'static str,
    /// Device of each rank.
    ranks: [&'static str; 2],
    settings: &'static [(&'static str, &'static str)],
    /// Text in NCCL's log if it uses this transport.
    said: &'static str,
}

const WAYS: [Way; 4] = [
    Way {
        name: "memory of peers, by its address",
        device: "cpu:2",
        ranks: ["0", "1"],
        settings: &[("NCCL_P2P_LEVEL", "SYS")],
        said: "via P2P/IPC",
    },
    Way {
        name: "memory of peers, by a descriptor",
        device: "cpu:2",
        ranks: ["0", "1"],
        settings: &[("NCCL_P2P_LEVEL", "SYS"), ("NCCL_CUMEM_ENABLE", "1")],
        said: "via P2P/CUMEM",
    },
    Way {
        name: "memory of the host",
        device: "cpu:2",
        ranks: ["0", "1"],
        settings: &[("NCCL_P2P_DISABLE", "1")],
        said: "via SHM/",
    },
    Way {
        name: "sockets, both ranks on one device",
        device: "cpu",
        ranks: ["0", "0"],
        settings: &[("COLLECTIVES_HOST_EACH", "1")],
        said: "via NET/Socket",
    },
];

/// Installs NCCL under `target/nccl`, runs all its operations between two ranks over each transport, and returns
/// whether every element was correct.
pub fn nccl(root: &Path) -> Result<bool, Failure> {
    let stage = stage::stage(root)?;
    let folder = root.join("target/nccl");
    let requirements = root.join("xtask/nccl/requirements.txt");
    install("NCCL (about 190 MB)", &requirements, &folder)?;
    let package = package(&folder, "nvidia/nccl")?;
    let library = package.join("lib");
    let program = folder.join("collectives");
    let [headers, libraries] = [("-I", package.join("include")), ("-L", library.clone())]
        .map(|(option, path)| format!("{option}{}", path.display()));
    let build = Build {
        name: "collectives".to_owned(),
        sources: vec![root.join("programs/nccl/collectives.cu")],
        flags: vec![headers, libraries, "-l:libnccl.so.2".to_owned()],
        outputs: vec![(Link::Static, program.clone())],
    };
    nvcc::build(&toolchain::ensure(root)?, vec![build])?;
    let mut passed = 0;
    for way in &WAYS {
        step(&format!("two ranks by {}", way.name));
        let mut run = Run::new(stage.wormhole())
            .args(["run", "--placement", "process", "--device", way.device])
            .args(["--window", WINDOW, "--quiet", "--"])
            .args([&program])
            .args(way.ranks)
            .env("LD_LIBRARY_PATH", &library)
            .env("NCCL_DEBUG", "INFO");
        for (name, value) in way.settings {
            run = run.env(name, value);
        }
        let (status, text) = run.output()?;
        let says = |rank: usize| {
            let from = format!(" : {rank}[");
            text.lines()
                .any(|line| line.contains(&from) && line.contains(way.said))
        };
        let went = (0..way.ranks.len()).all(says);
        if status.success() && went {
            passed += 1;
        } else {
            print!("{text}");
        }
        println!(
            "nccl: {}: {}",
            way.name,
            match (status.success(), went) {
                (true, true) => "as computed",
                (true, false) => "failed: NCCL went another way",
                (false, _) => "failed",
            }
        );
    }
    println!("nccl: {passed} of {} ways passed", WAYS.len());
    Ok(passed == WAYS.len())
}
