//! The `oncegate` binary: everything is in the library.

use std::process::ExitCode;

/// A request makes many small allocations, nearly all of which end on the thread that made them.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    oncegate::cli::main()
}
