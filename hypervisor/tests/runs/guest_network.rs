//! Connects a guest to its host through a tap interface, and through passt.
//!
//! The interface is in a network namespace of the test's thread and of the processes that it starts, and goes with it.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, UdpSocket};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use crate::documents::{commands_of, root};
use crate::harness::{beside_other_guests, finish, program, wormhole};

/// Addresses of the network of docs/running.md.
pub const HOST: &str = "10.0.0.1";
pub const GUEST: &str = "10.0.0.2";
pub const PORT: u16 = 7001;
/// Address of the host that the guest's default route leads to, and that the tap interface's network does not have.
const BEYOND: &str = "10.78.0.1";
/// Address of a guest with a network by passt.
const BY_PASST: &str = "10.0.2.15";
/// Bytes that the host sends and the guest returns.
const BYTES: u32 = 12 << 20;
const PINGS: u32 = 20;
/// Length of the largest frame that is not segmented later.
const FULL_FRAME: u64 = 1514;

/// Returns the commands of docs/running.md on tap interfaces with this begin. `alice` is the user of the test.
fn commands_of_the_page(begin: &str) -> Vec<String> {
    let commands = commands_of(&root().join("docs/running.md")).into_iter();
    let commands = commands.filter(|line| line.starts_with(begin));
    commands.map(|line| line.replace("alice", "root")).collect()
}

/// Leaves the network namespace for a new one with the page's tap interface. Returns the reason if that is impossible.
fn enter_network() -> Result<(), String> {
    if !Path::new("/dev/net/tun").exists() {
        return Err("this machine has no /dev/net/tun".to_owned());
    }
    // SAFETY: unshare takes no pointers. It moves this thread and the processes that it starts.
    if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
        let error = io::Error::last_os_error();
        return Err(format!("no network namespace can be made here: {error}"));
    }
    let commands = commands_of_the_page("ip ");
    assert!(commands.len() >= 3, "{commands:?}");
    commands
        .iter()
        .try_for_each(|line| ip(&line["ip ".len()..]))
}

/// Runs ip(8) in this thread's network namespace.
fn ip(arguments: &str) -> Result<(), String> {
    let run = Command::new("ip").args(arguments.split(' ')).output();
    let run = run.map_err(|error| format!("ip of iproute2 does not start: {error}"))?;
    if !run.status.success() {
        let said = String::from_utf8_lossy(&run.stderr);
        return Err(format!("ip {arguments}: {}", said.trim()));
    }
    Ok(())
}

/// Gives the namespace an address that only its own processes reach, and the default route without which passt does not
/// start.
fn add_address_beyond() {
    for arguments in [
        "link set lo up",
        &format!("address add {BEYOND}/32 dev lo"),
        &format!("route add default via {GUEST} dev tap0"),
    ] {
        ip(arguments).expect("the namespace is ours");
    }
}

/// Returns the first word of what sha256sum(1) prints for these bytes.
fn checksum(bytes: &[u8]) -> String {
    let mut command = Command::new("sha256sum");
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut sum = command.spawn().expect("it starts");
    let mut stdin = sum.stdin.take().expect("it is piped");
    stdin.write_all(bytes).expect("it reads");
    drop(stdin);
    let said = sum.wait_with_output().expect("it ends").stdout;
    let said = String::from_utf8(said).expect("a checksum");
    said.split(' ').next().expect("a word").to_owned()
}

/// Sends the pattern to each client, and what each returns to `returned`.
fn serve_streams(listener: &TcpListener, pattern: &[u8], returned: &Sender<Vec<u8>>) {
    // An attempt on an emulated host that failed leaves a broken connection.
    for mut client in listener.incoming().flatten() {
        let mut back = Vec::new();
        let served = client
            .write_all(pattern)
            .and_then(|()| client.shutdown(Shutdown::Write))
            .and_then(|()| client.read_to_end(&mut back));
        if served.is_ok() {
            let _ = returned.send(back);
        }
    }
}

/// Returns each datagram. After the first it sends one to a port of the guest that is closed, which the guest refuses.
/// Linux limits the rate of such refusals.
fn serve_datagrams(socket: &UdpSocket, refused: &Sender<ErrorKind>) {
    let mut room = [0; 64];
    while let Ok((length, client)) = socket.recv_from(&mut room) {
        let datagram = &room[..length];
        if datagram == b"ping 1\n" {
            let probe = UdpSocket::bind((HOST, 0)).expect("a socket");
            probe.connect((GUEST, 9)).expect("a route");
            let patience = Some(Duration::from_secs(60));
            probe.set_read_timeout(patience).expect("a time");
            let refusal = probe.send(b"?").and_then(|_| probe.recv(&mut [0; 1]));
            let _ = refused.send(refusal.expect_err("nothing answers").kind());
        }
        let _ = socket.send_to(datagram, client);
    }
}

/// Returns the script of the guest, a bash script.
fn script(vector_add: &Path) -> String {
    format!(
        r#"while [ ! -e /tmp/done ]; do {} || echo FAILED; done &
        count() {{ read -r $1 < /sys/class/net/eth0/statistics/$1; }}
        exec 3<>/dev/tcp/{HOST}/{PORT} || exit 8
        cat <&3 >/tmp/received
        count rx_bytes; count rx_packets; echo "received $rx_bytes $rx_packets"
        cat /tmp/received >&3
        exec 3>&-
        count tx_bytes; count tx_packets; echo "sent $tx_bytes $tx_packets"
        exec 4<>/dev/udp/{HOST}/{PORT} || exit 9
        i=0
        while [ $((i += 1)) -le {PINGS} ]; do
            echo "ping $i" >&4
            [ "$(dd bs=64 count=1 <&4 2>/dev/null)" = "ping $i" ] || exit 10
        done
        [ -d /sys/class/net/eth1 ] || exit 11
        grep -q {BY_PASST} /proc/net/fib_trie || exit 12
        # passt resets a connection whose guest acknowledges nothing for some seconds, as one without a processor does.
        for attempt in 1 2 3 4 5; do
            exec 5<>/dev/tcp/{BEYOND}/{PORT} || exit 13
            sum=$(sha256sum <&5)
            exec 5>&-
            [ -z "$sum" ] || break
        done
        echo "by passt $sum"
        : >/tmp/done
        wait"#,
        vector_add.display()
    )
}

#[test]
fn a_guest_and_its_host_reach_each_other_through_a_tap_and_passt() {
    let _beside = beside_other_guests();
    if let Err(reason) = enter_network() {
        println!("skipped: {reason}");
        return;
    }
    add_address_beyond();
    let pattern: Vec<u8> = (0..BYTES / 4).flat_map(u32::to_le_bytes).collect();
    let beyond = TcpListener::bind((BEYOND, PORT)).expect("the port is free");
    // The guest sends nothing back to this one.
    let part = pattern[..BYTES as usize / 8].to_vec();
    let sum = checksum(&part);
    std::thread::spawn(move || serve_streams(&beyond, &part, &channel().0));
    let listener = TcpListener::bind((HOST, PORT)).expect("the port is free");
    let socket = UdpSocket::bind((HOST, PORT)).expect("the port is free");
    let ((returned, streams), (refused, refusals)) = (channel(), channel());
    std::thread::spawn({
        let pattern = pattern.clone();
        move || serve_streams(&listener, &pattern, &returned)
    });
    std::thread::spawn(move || serve_datagrams(&socket, &refused));

    let vector_add = program("static", "vector_add");
    let lines = commands_of_the_page("target/wormhole/bin/wormhole run --network tap=");
    let [line] = &lines[..] else {
        panic!("docs/running.md has other commands: {lines:?}");
    };
    assert!(line.contains(GUEST), "{line}");
    let words = line.trim_end_matches("./my_program").split_whitespace();
    let options: Vec<&str> = words.skip_while(|word| *word != "--network").collect();
    let mut command = wormhole(&["run", "--placement", "host"]);
    command.args(options).args(["--network", "passt"]);
    let run = finish(command.args(["--", "/bin/bash", "-c", &script(&vector_add)]));
    assert!(run.status.success(), "{:?}\n{}", run.status, run.stderr);
    assert!(run.stdout.contains("PASS vector_add"), "{}", run.stdout);
    assert!(!run.stdout.contains("FAILED"), "{}", run.stdout);
    let by_passt = format!("by passt {sum}");
    assert!(
        run.stdout.contains(&by_passt),
        "{by_passt}\n{}\n{}",
        run.stdout,
        run.stderr
    );
    let back = streams.try_iter().last().expect("a whole connection");
    assert!(back == pattern, "{} other bytes came back", back.len());
    let refusal = refusals.try_iter().last();
    assert_eq!(refusal, Some(ErrorKind::ConnectionRefused));
    for way in ["received", "sent"] {
        let line = run.stdout.lines().find_map(|line| line.strip_prefix(way));
        let numbers = line.unwrap_or_else(|| panic!("{way}: {}", run.stdout));
        let numbers: Vec<u64> = numbers
            .split_whitespace()
            .map(|number| number.parse().expect("a number"))
            .collect();
        let [bytes, packets] = numbers[..] else {
            panic!("{way}: {numbers:?}");
        };
        // The socket may still hold the last of the bytes that it sends.
        assert!(bytes > u64::from(BYTES / 2), "{way} {bytes} bytes");
        // Segmentation is the host's work: the guest's frames are longer than the network's.
        assert!(
            bytes > FULL_FRAME * packets,
            "{way} {bytes} bytes in {packets} frames"
        );
    }
}
