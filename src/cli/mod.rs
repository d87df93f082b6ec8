//! The `kv-indexer` command line: questions to a server, and recordings of event streams.
//!
//! | part | what it is |
//! |---|---|
//! | `asking` | `query`, `match`, `hits`, `workers`: one question each |
//! | `prompt` | the hashes that a question is about, from numbers or token ids |
//! | `recording` | files of recorded messages: written, and read in two forms |
//! | `record`, `replay`, `show`, `verify` | what is done with recordings |
//! | `bench` | load for a server, and a server that does nothing |
//! | `feed` | a recorded stream as the changes that a bridge would report |
//! | `remote` | connections to a server, and its errors as exit codes |
//! | `output` | tables, JSON and progress |
//!
//! A command writes its result to the given output and its progress to standard error,
//! and only where that is a terminal. It reads no environment: the binary passes its
//! arguments and a look-up in.
//!
//! Exit codes, for scripts:
//!
//! | code | meaning |
//! |---|---|
//! | 0 | done; of a question: something was found |
//! | 1 | nothing was found; of `verify`: there are differences |
//! | 2 | bad arguments, or input that cannot be read |
//! | 3 | no answer: nobody there, too late, overloaded |
//! | 4 | the server refused, or does not speak the contract |

mod asking;
mod bench;
mod feed;
mod output;
mod prompt;
mod record;
mod recording;
mod remote;
mod replay;
mod show;
mod verify;

use std::ffi::OsString;
use std::fmt;
use std::io::{self, Read, Write};
use std::pin::Pin;

use clap::{CommandFactory, Parser, Subcommand};
use clap_complete::Shell;

use crate::version;

/// Variable with the server's URL, as the bridge has it.
const ENDPOINT: &str = "KV_INDEXER_ENDPOINT";

#[derive(Debug, Parser)]
#[command(
    name = "kv-indexer",
    version = version::LONG,
    about = "Asks an index which worker holds which KV cache block; records, shows and replays event streams.",
    after_help = "Exit codes: 0 done, 1 nothing found or differences, 2 bad arguments or input, 3 no answer, \
                  4 refused."
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Tells how many leading blocks of a prompt each worker can reuse, as a router asks.
    Query(asking::Query),
    /// Tells who holds which of the given blocks, each looked up by itself.
    Match(asking::Match),
    /// Tells how often the given blocks were matched by counting look-ups.
    Hits(asking::Hits),
    /// Tells which workers hold any of the given blocks, and how many at which tier.
    Workers(asking::Workers),
    /// Records an engine's event stream to a file.
    Record(record::Record),
    /// Plays a recording as a publisher, or reports it to a server as a bridge would.
    Replay(replay::Replay),
    /// Shows the events of a recording.
    Show(show::Show),
    /// Compares a server with what it should hold after a recording.
    Verify(verify::Verify),
    /// Loads a server with calls and tells how fast it answers.
    #[command(subcommand)]
    Bench(bench::Bench),
    /// Writes a completion script for a shell.
    Completions {
        /// The shell.
        shell: Shell,
    },
}

/// What a command runs with.
pub struct Environment<'a> {
    /// Where results go; styles are always written, so that it has to drop those nobody wants.
    pub out: &'a mut dyn Write,
    /// Where errors go.
    pub err: &'a mut dyn Write,
    /// What `-` reads.
    pub input: &'a mut dyn Read,
    /// Looks a variable up.
    pub variable: &'a dyn Fn(&str) -> Option<OsString>,
    /// Done once the command should stop; has to be polled before anything else to be in time.
    pub shutdown: Pin<Box<dyn Future<Output = ()> + Send>>,
}

/// How a command that could do its work ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    /// Exit code 0.
    Done,
    /// Exit code 1: nothing found, or differences.
    Negative,
}

impl Outcome {
    /// Whether something was found.
    fn found(found: bool) -> Self {
        if found { Outcome::Done } else { Outcome::Negative }
    }
}

/// Why a command could not do its work.
#[derive(Debug)]
enum Failure {
    /// Exit code 2: the arguments, or an input, are of no use.
    Input(String),
    /// Exit code 3: there was no answer.
    NoAnswer(String),
    /// Exit code 4: the answer was no.
    Refused(String),
    /// The output was closed, which ends a command well, or cannot be written.
    Output(io::Error),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Input(text) | Failure::NoAnswer(text) | Failure::Refused(text) => f.write_str(text),
            Failure::Output(error) => write!(f, "cannot write: {error}"),
        }
    }
}

/// Every file that is read or written by name says so in its own errors, so this is the output's.
impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Failure::Output(error)
    }
}

/// Runs a command line and returns its exit code.
pub async fn run(arguments: impl IntoIterator<Item = OsString>, mut environment: Environment<'_>) -> u8 {
    let command = match Arguments::try_parse_from(arguments) {
        Ok(arguments) => arguments.command,
        Err(error) => {
            let text = error.render();
            let to = if error.use_stderr() { &mut environment.err } else { &mut environment.out };
            // Who closed the output has read enough.
            let _ = write!(to, "{}", text.ansi());
            return u8::try_from(error.exit_code()).unwrap_or(2);
        }
    };
    let failure = match dispatch(command, &mut environment).await {
        Ok(outcome) => return outcome as u8,
        Err(failure) => failure,
    };
    let code = match &failure {
        Failure::Output(error) if error.kind() == io::ErrorKind::BrokenPipe => return 0,
        Failure::Input(_) | Failure::Output(_) => 2,
        Failure::NoAnswer(_) => 3,
        Failure::Refused(_) => 4,
    };
    let _ = writeln!(environment.err, "kv-indexer: {failure}");
    code
}

async fn dispatch(command: Command, environment: &mut Environment<'_>) -> Result<Outcome, Failure> {
    let outcome = match command {
        Command::Query(command) => command.run(environment).await,
        Command::Match(command) => command.run(environment).await,
        Command::Hits(command) => command.run(environment).await,
        Command::Workers(command) => command.run(environment).await,
        Command::Record(command) => command.run(environment).await,
        Command::Replay(command) => command.run(environment).await,
        Command::Show(command) => command.run(environment),
        Command::Verify(command) => command.run(environment).await,
        Command::Bench(command) => command.run(environment).await,
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Arguments::command(), "kv-indexer", &mut script);
            environment.out.write_all(&script)?;
            Ok(Outcome::Done)
        }
    }?;
    environment.out.flush()?;
    Ok(outcome)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_in_order() {
        Arguments::command().debug_assert();
    }
}
