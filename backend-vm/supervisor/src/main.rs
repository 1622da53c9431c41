//! The supervisor's executable.

fn main() -> std::process::ExitCode {
    wormhole_supervisor::main()
}
