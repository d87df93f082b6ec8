//! What a query without an answer means to a router.
//!
//! Four classes say "route by load", one says that the two sides disagree about the
//! contract. The class of a status follows the contract; a connection that breaks
//! in the middle of a call has no status of the server's, whatever code it is given
//! on this side, and counts as unreachable.

use std::error::Error;
use std::fmt;
use std::sync::Arc;

use tonic::{Code, Status};

/// What kind of failure a query met.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorClass {
    /// Nobody answers there, or the connection broke.
    Unreachable,
    /// The deadline passed, or the call was cancelled.
    Timeout,
    /// Too many queries at once, here or at the server.
    Overloaded,
    /// The query or its answer is larger than a message may be.
    TooLarge,
    /// The two sides disagree about the contract: asking again cannot help.
    Rejected,
}

impl ErrorClass {
    /// Every class.
    pub const ALL: [ErrorClass; 5] = [
        ErrorClass::Unreachable,
        ErrorClass::Timeout,
        ErrorClass::Overloaded,
        ErrorClass::TooLarge,
        ErrorClass::Rejected,
    ];

    /// Whether to route by load; otherwise the request fails.
    pub fn falls_back(self) -> bool {
        self != ErrorClass::Rejected
    }

    /// A short name in snake case, for metrics.
    pub fn name(self) -> &'static str {
        match self {
            ErrorClass::Unreachable => "unreachable",
            ErrorClass::Timeout => "timeout",
            ErrorClass::Overloaded => "overloaded",
            ErrorClass::TooLarge => "too_large",
            ErrorClass::Rejected => "rejected",
        }
    }

    /// The class of a call's status.
    pub(crate) fn of(status: &Status) -> Self {
        match status.code() {
            Code::Unavailable => ErrorClass::Unreachable,
            Code::Cancelled if never_sent(status) => ErrorClass::Unreachable,
            Code::DeadlineExceeded | Code::Cancelled => ErrorClass::Timeout,
            Code::ResourceExhausted => ErrorClass::Overloaded,
            Code::OutOfRange => ErrorClass::TooLarge,
            // A status with a source was made on this side, of a connection that broke.
            _ if status.source().is_some() => ErrorClass::Unreachable,
            _ => ErrorClass::Rejected,
        }
    }
}

/// Whether a call was cancelled on this side because its connection closed before it was sent.
fn never_sent(status: &Status) -> bool {
    let mut cause = status.source();
    while let Some(error) = cause {
        if error.downcast_ref::<hyper::Error>().is_some_and(hyper::Error::is_canceled) {
            return true;
        }
        cause = error.source();
    }
    false
}

impl fmt::Display for ErrorClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Why a query has no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueryError {
    /// What to do about it.
    pub class: ErrorClass,
    /// Who failed; `None` where nobody was asked.
    pub endpoint: Option<Arc<str>>,
    /// For the log.
    pub reason: String,
}

impl QueryError {
    /// An error that no endpoint has made.
    pub(super) fn here(class: ErrorClass, reason: impl Into<String>) -> Self {
        QueryError { class, endpoint: None, reason: reason.into() }
    }
}

impl fmt::Display for QueryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.endpoint {
            Some(endpoint) => write!(f, "{endpoint}: {}: {}", self.class, self.reason),
            None => write!(f, "{}: {}", self.class, self.reason),
        }
    }
}

impl Error for QueryError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_have_the_classes_of_the_contract() {
        let check = |code, class| assert_eq!(ErrorClass::of(&Status::new(code, "")), class, "{code:?}");
        check(Code::Unavailable, ErrorClass::Unreachable);
        check(Code::DeadlineExceeded, ErrorClass::Timeout);
        check(Code::Cancelled, ErrorClass::Timeout);
        check(Code::ResourceExhausted, ErrorClass::Overloaded);
        check(Code::OutOfRange, ErrorClass::TooLarge);
        for number in 0..=16 {
            let code = Code::from_i32(number);
            if ![1, 4, 8, 11, 14].contains(&number) {
                check(code, ErrorClass::Rejected);
            }
        }
    }

    #[test]
    fn a_broken_connection_is_unreachable_whatever_its_code() {
        let status = Status::from_error(Box::new(std::io::Error::from(std::io::ErrorKind::BrokenPipe)));
        assert_eq!(status.code(), Code::Unknown);
        assert_eq!(ErrorClass::of(&status), ErrorClass::Unreachable);
    }

    #[test]
    fn only_a_disagreement_fails_the_request() {
        let failing = ErrorClass::ALL.into_iter().filter(|class| !class.falls_back());
        assert_eq!(failing.collect::<Vec<_>>(), [ErrorClass::Rejected]);
    }
}
