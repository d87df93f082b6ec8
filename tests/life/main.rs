//! How a server lives: which one it is, whom it still hears, when it is ready, and what
//! an operator may ask and tell it.

mod admin;
mod instance;
mod readiness;
mod server;
mod silence;
