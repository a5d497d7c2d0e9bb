//! The command `oncegate`.

use std::process::ExitCode;

/// Half of what a request costs besides the kernel is small allocations, most of which end on the thread that made them.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    oncegate::cli::main()
}
