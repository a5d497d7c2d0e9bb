//! The `oncegate` binary: everything is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    oncegate::cli::main()
}
