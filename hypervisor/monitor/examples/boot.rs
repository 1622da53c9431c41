//! Boots a kernel with an initramfs and a window. Echoes the guest's vsock data, refuses connections
//! to port 1, and only counts the bytes on port 9.
//!
//! ```text
//! boot KERNEL INITRAMFS [--memory MIB] [--vcpus N] [--window MIB] [--timeout SECONDS]
//!      [--disable-pause] [--tap INTERFACE] [--append "COMMAND LINE"]
//! ```

use std::error::Error;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use wormhole_monitor::{
    BootSource, ConnectRequest, DisabledExits, InitramfsPart, MacAddress, NetConfig, Refused,
    Start, Tap, Vm, VmConfig, VsockConfig, probe, sealed_file,
};

fn main() -> ExitCode {
    match boot() {
        Ok(code) => code,
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

fn boot() -> Result<ExitCode, Box<dyn Error>> {
    if let Some(why) = probe().why() {
        return Err(why.into());
    }
    let mut args = std::env::args().skip(1);
    let kernel = PathBuf::from(args.next().ok_or("which kernel?")?);
    let initramfs = PathBuf::from(args.next().ok_or("which initramfs?")?);
    let (mut memory, mut vcpus, mut window, mut timeout) = (256, 1, 64, 120);
    let mut disabled_exits = DisabledExits::default();
    let mut networks = Vec::new();
    let mut command_line = "console=ttyS0 quiet panic=-1 reboot=k".to_owned();
    while let Some(flag) = args.next() {
        if flag == "--disable-pause" {
            disabled_exits.pause = true;
            continue;
        }
        let value = args.next().ok_or_else(|| format!("{flag} wants a value"))?;
        match flag.as_str() {
            "--memory" => memory = value.parse()?,
            "--vcpus" => vcpus = value.parse()?,
            "--window" => window = value.parse()?,
            "--timeout" => timeout = value.parse()?,
            "--tap" => networks.push(NetConfig {
                end: Box::new(Tap::open(&value)?),
                mac: MacAddress::local(0),
            }),
            "--append" => command_line = format!("{command_line} {value}"),
            _ => return Err(format!("unknown option {flag}").into()),
        }
    }
    let start = Instant::now();
    let vm = Vm::new(VmConfig {
        start: Start::Boot(BootSource {
            kernel,
            initramfs: vec![InitramfsPart::Path(initramfs)],
            command_line,
        }),
        memory_mib: memory,
        vcpus,
        window: (window > 0)
            .then(|| sealed_file("window", window << 20).map(Into::into))
            .transpose()?,
        vsock: Some(VsockConfig {
            guest_cid: 3,
            acceptor: Box::new(echo),
        }),
        file_systems: Vec::new(),
        disks: Vec::new(),
        networks,
        passed_through: Vec::new(),
        prefault: false,
        console: Box::new(std::io::stdout()),
        timeout: Some(Duration::from_secs(timeout)),
        disabled_exits,
        pins: Vec::new(),
        server: None,
    })?;
    println!(
        "loaded in {:?}; window at {:x?}",
        start.elapsed(),
        vm.window_range()
    );
    let stats = vm.stats();
    let report = vm.run()?;
    println!("{} after {:?}", report.outcome, report.duration);
    println!("exits to the monitor: {:?}", report.exits);
    let snapshot = stats.read()?;
    println!(
        "KVM counts {} + {} statistics, {} exits",
        snapshot.vm.len(),
        snapshot
            .vcpus
            .first()
            .map_or(0, std::collections::BTreeMap::len),
        snapshot.vcpu_sum("exits")
    );
    let status = report
        .outcome
        .status()
        .map_or(1, |status| u8::try_from(status).unwrap_or(1));
    Ok(ExitCode::from(status))
}

/// Echoes received data on a new thread.
fn echo(request: ConnectRequest) -> Result<UnixStream, Refused> {
    if request.port == 1 {
        return Err(Refused);
    }
    let (guest, mut stream) = UnixStream::pair().map_err(|_| Refused)?;
    std::thread::spawn(move || {
        let mut total = 0;
        let mut buffer = [0; 4096];
        while let Ok(len @ 1..) = stream.read(&mut buffer) {
            total += len;
            // Port 9 does not echo.
            if request.port != 9 && stream.write_all(&buffer[..len]).is_err() {
                break;
            }
        }
        println!("vsock port {}: {total} bytes, then the end", request.port);
    });
    Ok(guest)
}
