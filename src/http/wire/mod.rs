//! Reads what a client sends before anything else does.
//!
//! Two readers of one stream must never see two different requests. So every byte of a connection is judged by the
//! grammar of RFC 9112 on its way from the socket: what is not one request beyond doubt is not repaired, as hyper would
//! and as another server behind would in another way, but refused, and the connection with it. What passes is what came,
//! byte for byte.
//!
//! `head`, `chunks` and `message` are pure: bytes in, verdict out. `stream` lays them between a socket and hyper.

mod chunks;
mod fault;
mod head;
mod interim;
mod line;
mod message;
mod stream;

pub use self::fault::{Fault, fault_of};
pub(super) use self::head::{check_target, judge_trailer_fields};
pub use self::interim::Interim;
pub use self::line::Exchange;
pub(super) use self::line::{Begun, Line};
pub use self::message::Message;
pub(super) use self::stream::Stream;
