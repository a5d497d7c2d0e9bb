//! A protected request and its attempt: what one request holds from its claim to its settlement.

pub(super) mod attempt;
pub(super) mod attempt_tokens;
pub(super) mod delivery_context;
pub(super) mod id_rotation;
pub(super) mod protected;
pub(super) mod quota;
pub(super) mod renewal;
pub(super) mod second_look;
pub(super) mod single_flight;
