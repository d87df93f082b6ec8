//! `kv-indexer-bridge`: follows engines' KV events and reports them to a server.
//!
//! Sets the allocator, logging, configuration and exit code; everything else is
//! [`sgl_kv_indexer::bridge`]'s. Exits 0 when told to stop, 1 when the server
//! refuses a batch for good, 2 on a bad setting.

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::Command;
use sgl_kv_indexer::bridge::config::{Config, TABLE};
use sgl_kv_indexer::bridge::{Bridge, RunError, streams};
use sgl_kv_indexer::settings::{Invocation, LOG_FILTER, LOG_FILTER_TAKES, Settings};
use sgl_kv_indexer::version;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[tokio::main]
async fn main() -> ExitCode {
    let command = Command::new("kv-indexer-bridge")
        .version(version::LONG)
        .about("Follows engines' KV cache events and reports them to a kv-indexer-server.");
    let invocation = Settings::read(TABLE, command, std::env::args_os(), |name| std::env::var_os(name));
    let configs = match invocation {
        Ok(Invocation::Run(settings)) => configure(&settings),
        Ok(Invocation::Exit { text, code: 0 }) => {
            print!("{text}");
            return ExitCode::SUCCESS;
        }
        Ok(Invocation::Exit { text, code }) => {
            eprint!("{text}");
            return ExitCode::from(code);
        }
        Err(error) => Err(error.to_string()),
    };
    let (configs, filter) = match configs {
        Ok(configured) => configured,
        Err(error) => {
            eprintln!("kv-indexer-bridge: {error}");
            return ExitCode::from(2);
        }
    };
    let colours = std::io::stderr().is_terminal();
    tracing_subscriber::fmt().with_env_filter(filter).with_ansi(colours).with_writer(std::io::stderr).init();

    // Before anything is connected, so that no signal is missed.
    let (mut terminate, mut interrupt) =
        match (signal(SignalKind::terminate()), signal(SignalKind::interrupt())) {
            (Ok(terminate), Ok(interrupt)) => (terminate, interrupt),
            (Err(error), _) | (_, Err(error)) => {
                eprintln!("kv-indexer-bridge: cannot wait for signals: {error}");
                return ExitCode::FAILURE;
            }
        };
    let shutdown = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    match Bridge::new(configs).run(shutdown).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kv-indexer-bridge: {error}");
            match error {
                RunError::Server(_) => ExitCode::from(2),
                RunError::Refused(_) | RunError::Panicked => ExitCode::FAILURE,
            }
        }
    }
}

/// Reads all settings: the streams, and what of them to log.
fn configure(settings: &Settings) -> Result<(Vec<Config>, EnvFilter), String> {
    let configs = streams::read(settings).map_err(|error| error.to_string())?;
    let filter = settings
        .parse(&LOG_FILTER, LOG_FILTER_TAKES, |text| EnvFilter::try_new(text).ok())
        .map_err(|error| error.to_string())?;
    Ok((configs, filter))
}
