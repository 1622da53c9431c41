//! The worker's executable.

fn main() -> std::process::ExitCode {
    wormhole_worker::main()
}
