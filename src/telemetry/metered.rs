//! A store that counts and times every call.
