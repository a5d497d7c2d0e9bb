//! HTTP/2 frame headers (RFC 9113, 4.1 and 6).

/// The length of a frame's header.
pub(super) const HEADER: usize = 9;

pub(super) const DATA: u8 = 0;
pub(super) const HEADERS: u8 = 1;
pub(super) const RST_STREAM: u8 = 3;
pub(super) const SETTINGS: u8 = 4;
pub(super) const PUSH_PROMISE: u8 = 5;
pub(super) const GOAWAY: u8 = 7;
pub(super) const WINDOW_UPDATE: u8 = 8;
pub(super) const CONTINUATION: u8 = 9;

pub(super) const ACK: u8 = 1;
pub(super) const END_STREAM: u8 = 1;
pub(super) const END_HEADERS: u8 = 4;
pub(super) const PADDED: u8 = 8;
pub(super) const PRIORITY: u8 = 0x20;

/// The payload length in a frame header.
pub(super) fn length([a, b, c, ..]: [u8; HEADER]) -> u32 {
    u32::from_be_bytes([0, a, b, c])
}
