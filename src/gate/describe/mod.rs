//! What the gate says of its configuration: to operators who ask about a request, and to clients on the policy page.

pub mod explain;
pub(super) mod policy_page;
pub(super) mod possible_outcomes;
