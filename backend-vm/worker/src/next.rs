//! The program `wormhole-worker` of the next protocol version, for tests of version matching.

fn main() -> std::process::ExitCode {
    wormhole_worker::main()
}
