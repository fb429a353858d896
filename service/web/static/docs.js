/* Starts Swagger UI on our own OpenAPI document. */
window.addEventListener("load", () => {
  SwaggerUIBundle({ url: "/openapi.json", dom_id: "#interface", deepLinking: true, validatorUrl: null });
});
