//! The command line: allocator, arguments, signals, output and exit code.
//!
//! `sgl_kv_indexer::cli` has the commands and says what the exit codes mean.

use std::io::BufWriter;
use std::process::ExitCode;

use sgl_kv_indexer::cli::{self, Environment};
use tokio::signal::unix::{SignalKind, signal};

#[cfg(feature = "mimalloc")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[tokio::main]
async fn main() -> ExitCode {
    // Buffered, as a table can have a million rows. The stream drops styles where no terminal reads them.
    let mut out = BufWriter::new(anstream::stdout());
    let environment = Environment {
        out: &mut out,
        err: &mut anstream::stderr(),
        input: &mut std::io::stdin(),
        variable: &|name| std::env::var_os(name),
        shutdown: Box::pin(told_to_stop()),
    };
    ExitCode::from(cli::run(std::env::args_os(), environment).await)
}

/// Done at SIGTERM or ctrl-c. The handlers are there from the first poll on: a command that
/// never asks is ended by the signal itself.
async fn told_to_stop() {
    match (signal(SignalKind::terminate()), signal(SignalKind::interrupt())) {
        (Ok(mut terminate), Ok(mut interrupt)) => tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        },
        // Without handlers the signals end the process, so there is nothing to wait for.
        (Err(_), _) | (_, Err(_)) => std::future::pending().await,
    }
}
